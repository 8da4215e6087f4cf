"""The engine process: loads a model, then turns messages into steps until it is told to stop or its parent is gone.

    python -m headrace.engine.process --socket=FD --life=FD --parent=PID --backend=NAME   < one line of JSON: a Job

Started by `engine.spawn`; `engine.link` draws the pipes. Between steps it takes whatever has arrived; with nothing to
do it sleeps on its inbox, and polls nothing. It never decides to live longer than its parent: the kernel kills it when
the parent dies, and the end of its inbox says so too.
"""

import argparse
import ctypes
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec

from headrace.base.clock import Clock, SystemClock
from headrace.base.config import cache_dir
from headrace.base.logging import configure_logging
from headrace.engine.frames import FrameSocket
from headrace.engine.launch import Launched, launch, preload
from headrace.engine.link import BEAT_BYTES, Job
from headrace.engine.messages import Abort, Add, Failed, Finish, FromEngine, Loading, Shutdown, ToEngine
from headrace.engine.self_test import SelfTestRun, remember, remembered

log = logging.getLogger("headrace.engine")

_PR_SET_PDEATHSIG = 1
_CALM_MS = 500  # of idle time before checks and measurements; real work rarely pauses just so long


class Channel:
    """The socket to the parent, and the notice that the parent is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._frames = FrameSocket(end)
        self._poller = select.poll()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        self._frames.send(self._encoder.encode(message))

    def receive(self, timeout_ms: int | None) -> list[ToEngine]:
        """Everything that has arrived; waits up to `timeout_ms` for the first, None for ever.

        A parent that is gone reads as Shutdown.
        """
        if timeout_ms != 0 or self._frames.has_unsent:
            self._wait(timeout_ms)
        messages: list[ToEngine] = [self._decoder.decode(frame) for frame in self._frames.receive()]
        if self._frames.is_closed:
            messages.append(Shutdown())
        return messages

    def close(self, linger_ms: int) -> None:
        """Waits up to `linger_ms` for each part of what was sent to leave."""
        while self._frames.has_unsent and self._poll(select.POLLOUT, linger_ms):
            self._frames.flush()
        self._frames.close()

    def _wait(self, timeout_ms: int | None) -> None:
        """Until there is something to read. What could not be sent yet leaves meanwhile."""
        while self._frames.has_unsent:
            ready = self._poll(select.POLLIN | select.POLLOUT, timeout_ms)
            self._frames.flush()
            if not ready or ready & ~select.POLLOUT:
                return
        self._poll(select.POLLIN, timeout_ms)

    def _poll(self, events: int, timeout_ms: int | None) -> int:
        """The events that came; 0 when time ran out."""
        self._poller.register(self._frames, events)
        return next((event for _, event in self._poller.poll(timeout_ms)), 0)


class Heart(threading.Thread):
    """Beats while the process lives. Says for how long the current step has been running."""

    def __init__(self, life: int, interval_s: float, clock: Clock) -> None:
        super().__init__(name="heart", daemon=True)
        self.step_since_ns = 0  # 0: between steps
        self._life = life
        self._interval_s = interval_s
        self._clock = clock
        self._stop = threading.Event()

    def run(self) -> None:
        while not self._stop.wait(self._interval_s):
            since_ns = self.step_since_ns
            step_ns = self._clock.now_ns() - since_ns if since_ns else 0
            try:
                os.write(self._life, step_ns.to_bytes(BEAT_BYTES, "little"))
            except (BrokenPipeError, BlockingIOError):  # the parent is gone, or stopped reading: not ours to judge
                continue


class Loop:
    """Messages in, steps out, until Shutdown. Idle time goes to the self-test and to checking the books."""

    def __init__(self, launched: Launched, channel: Channel, heart: Heart, clock: Clock, measurements: Path) -> None:
        self._engine = launched.engine
        self._launched = launched
        self._channel = channel
        self._heart = heart
        self._clock = clock
        self._measurements = measurements
        self._wants_self_test = False
        self._run: SelfTestRun | None = None

    def run(self, self_test: bool) -> None:
        """Returns at Shutdown. Raises what ends an engine."""
        if self_test:
            known = remembered(self._measurements, self._launched.identity)
            self._wants_self_test = known is None
            if known is not None:
                self._channel.send(known)
        is_calm = False  # nothing came for a while, and what idle time is for has been done
        while True:
            messages = self._channel.receive(self._patience(is_calm))
            if any(isinstance(message, Shutdown) for message in messages):
                return
            if messages:
                is_calm = False
                self._handle(messages)
            if self._engine.has_work and self._run is None:
                self._step()
            elif self._run is not None:
                self._measure(self._run)
            elif not messages and not is_calm:
                is_calm = True
                self._use_idle_time()

    def _patience(self, is_calm: bool) -> int | None:
        """Milliseconds to wait for messages; None for ever."""
        if self._run is not None or self._engine.has_work:
            return 0
        return None if is_calm else _CALM_MS

    def _handle(self, messages: list[ToEngine]) -> None:
        if self._run is not None:
            self._run.cancel()
            self._run = None
        changed = False
        for message in messages:
            if isinstance(message, (Add, Abort, Finish)):
                changed = self._engine.handle(message) or changed
        if changed and not self._engine.has_work:
            self._step()  # nothing to compute, but something ended: report it now

    def _step(self) -> None:
        self._heart.step_since_ns = self._clock.now_ns()
        step = self._engine.step()
        self._heart.step_since_ns = 0
        self._channel.send(step)

    def _use_idle_time(self) -> None:
        self._engine.scheduler.check_integrity()
        if self._wants_self_test:
            self._run = SelfTestRun(self._engine, self._launched.recorder, self._clock)
            if not self._run.is_possible:
                self._wants_self_test, self._run = False, None

    def _measure(self, run: SelfTestRun) -> None:
        result = run.step()
        if result is not None:
            self._wants_self_test, self._run = False, None
            self._channel.send(result)
            remember(self._measurements, self._launched.identity, result)


def run(job: Job, channel: Channel, heart: Heart) -> None:
    clock = SystemClock()

    def report(phase: str, fraction: float) -> None:
        channel.send(Loading(phase, fraction))

    launched = launch(job.config, Path(job.model_path), job.epoch, clock, report)
    gc.freeze()
    gc.enable()
    try:
        channel.send(launched.ready)
        Loop(launched, channel, heart, clock, cache_dir(job.config.cache_dir)).run(job.config.self_test)
    finally:
        launched.engine.backend.close()


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill us when the parent dies, unless it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="headrace.engine.process")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--life", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--backend", required=True)
    given = parser.parse_args(arguments)
    die_with_parent(given.parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # for the parent, which lets us finish and then says Shutdown
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()  # a crash in native code says on stderr where it was
    os.set_blocking(given.life, False)
    gc.disable()  # what loading makes stays
    preload(given.backend)
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    channel = Channel(socket.socket(fileno=given.socket))
    channel.send(Loading("starting", 0.0))
    job = msgspec.json.decode(line, type=Job)
    configure_logging(job.config.log_level)
    heart = Heart(given.life, job.beat_s, SystemClock())
    heart.start()
    try:
        run(job, channel, heart)
    except Exception as error:
        log.debug("the engine ended", exc_info=True)
        channel.send(Failed(str(error) or type(error).__name__, type(error).__name__))
        channel.close(linger_ms=2000)
        return 1
    channel.close(linger_ms=0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
