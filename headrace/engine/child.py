"""One life of the engine process, as its parent sees it: started, spoken to, watched, ended.

A pipe carries life and a socket pair carries messages (`engine.link` draws them): nobody else can connect, and nothing
is left on disk however the two processes end. Knows no requests and never restarts anything.
Everything here runs on the event loop's thread; the child's death is reported once, by `on_death`.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.base.config import Config
from headrace.engine.frames import FrameError, FrameSocket
from headrace.engine.link import BEAT_BYTES, Job
from headrace.engine.messages import Failed, FromEngine, Ready, Shutdown, ToEngine
from headrace.engine.spawn import Spawned

_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Watch:
    """When a process that is still there counts as hung. Loading is not watched: it has no natural pace.

    Silence is counted in our own ticks, so that a pause of the whole machine or container is nobody's fault.
    """

    silence_s: float = 10.0  # no beat: the whole process stands still
    step_s: float = 600.0  # beats, but one step never ends

    @property
    def interval_s(self) -> float:
        """Seconds between beats, and between looks at them."""
        return min(1.0, self.silence_s / 4)


def first_job(config: Config, path: Path) -> Job:
    """What a supervisor with the usual `Watch` asks of its first process."""
    return Job(config, str(path), 1, Watch().interval_s)


class EngineProcess:
    def __init__(
        self,
        job: Job,
        spawned: Spawned,
        on_message: Callable[[FromEngine], None],
        on_death: Callable[[str], None],
        watch: Watch,
    ) -> None:
        self._on_message = on_message
        self._on_death = on_death
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._ended = False
        self._ready = False
        self._stopping = False
        self._failure = ""
        self._silent_ticks = 0
        self._step_ns = 0
        self._gone = asyncio.Event()
        spawned.take()
        self._process, self._life = spawned.process, spawned.life
        self._frames = FrameSocket(spawned.socket)
        os.set_blocking(self._life, False)
        spawned.give(job.line())
        self._loop.add_reader(self._life, self._on_life)
        self._loop.add_reader(self._frames, self._on_socket)
        self._timer = self._loop.call_later(watch.interval_s, self._check_pulse)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Queues a message; what a dying process no longer reads is lost."""
        if self._ended:
            return
        self._frames.send(self._encoder.encode(message))
        if self._frames.has_unsent:
            self._loop.add_writer(self._frames, self._flush)

    async def stop(self, grace_s: float) -> None:
        """Asks the process to leave and waits until it is gone; after `grace_s` it is killed. Reports no death.

        One that still loads has nothing to finish, and may not even be connected: it is killed at once.
        """
        self._stopping = True
        if self._ready:
            self.send(Shutdown())
        else:
            self.kill()
        try:
            async with asyncio.timeout(grace_s):
                await self._gone.wait()
        except TimeoutError:
            self.kill()
            await self._gone.wait()

    def kill(self) -> None:
        if not self._ended:
            self._process.kill()

    def _on_socket(self) -> None:
        try:
            for frame in self._frames.receive():
                self._take(self._decoder.decode(frame))
        except (msgspec.DecodeError, FrameError) as error:
            self._failure = f"the engine process sent what is no message: {error}"
            self.kill()
        if self._frames.is_closed:  # dead or dying: the life pipe tells, once it is over
            self._loop.remove_reader(self._frames)

    def _flush(self) -> None:
        self._frames.flush()
        if not self._frames.has_unsent:
            self._loop.remove_writer(self._frames)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            self._ready = True
            self._silent_ticks = 0
        elif isinstance(message, Failed):
            self._failure = message.error
        self._on_message(message)

    def _on_life(self) -> None:
        data = os.read(self._life, _READ_BYTES)
        if not data:
            self._end()
            return
        self._silent_ticks = 0
        if len(data) >= BEAT_BYTES:
            self._step_ns = int.from_bytes(data[-BEAT_BYTES:], "little")

    def _check_pulse(self) -> None:
        self._silent_ticks += 1
        silence_s = self._silent_ticks * self._watch.interval_s
        if self._ready and silence_s > self._watch.silence_s:
            self._hung(f"the engine process has shown no sign of life for {silence_s:g} s")
        elif self._ready and self._step_ns > self._watch.step_s * 1e9:
            self._hung(f"one step of the engine has run for {self._step_ns / 1e9:.0f} s")
        else:
            self._timer = self._loop.call_later(self._watch.interval_s, self._check_pulse)

    def _hung(self, problem: str) -> None:
        self._failure = f"{problem}; it was killed"
        self.kill()

    def _end(self) -> None:
        """The process is gone or going: nothing but it holds the life pipe."""
        self._on_socket()  # what it sent before it died still counts
        self._ended = True
        self._loop.remove_reader(self._life)
        self._loop.remove_reader(self._frames)
        self._loop.remove_writer(self._frames)
        self._timer.cancel()
        os.close(self._life)
        self._process.kill()
        code = self._process.wait()
        self._frames.close()
        self._gone.set()
        if not self._stopping:
            self._on_death(self._failure or _describe_exit(code, self._ready))


def _describe_exit(code: int, was_ready: bool) -> str:
    when = "" if was_ready else " while it was loading the model"
    if code >= 0:
        return f"the engine process ended with status {code}{when}"
    hint = "; the kernel does that when memory runs out" if code == -signal.SIGKILL else ""
    return f"the engine process was killed by {signal.Signals(-code).name}{when}{hint}"
