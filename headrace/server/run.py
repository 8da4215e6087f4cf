"""`serve`: one process that listens at once, loads the engine behind the open door, and leaves in order.

    listen -> answer probes while loading -> ready: summary, URL, curl line -> first signal: drain -> exit 0

At the first SIGTERM or Ctrl-C the server is no longer ready and takes no new work; what runs gets `shutdown_timeout`
seconds, then an error frame. A second signal ends at once. An engine that died for good ends the server with status 1,
so that whatever supervises it can act.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

import headrace
from headrace.base.config import Config, cache_dir, notify_socket
from headrace.base.logging import configure_logging
from headrace.core.events import Event, EventKind
from headrace.engine.client import AsyncEngine
from headrace.engine.model_path import Report
from headrace.engine.spawn import Spawned
from headrace.observe.metrics import Metrics
from headrace.server.answers import cancel
from headrace.server.app import create_app
from headrace.server.auth import parse_keys
from headrace.server.lifecycle import Lifecycle
from headrace.server.listen import listen, url_of
from headrace.server.notify import notify
from headrace.server.protocol import BoundedHttp
from headrace.server.running import RunningServer, registered
from headrace.server.service import served_name

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75  # longer than the usual 60 s of a proxy, so that it is never the server that closes first
_FLUSH_S = 5.0  # for last frames to leave after the engine is gone
_CLOSE_S = 10.0  # for an engine to end that has nothing left to do
_CLOSE_LOADING_S = 1.0


def serve(
    config: Config, loading: AbstractContextManager[Report | None] | None = None, spawned: Spawned | None = None
) -> int:
    """Serves until a signal. Returns the exit status. Raises ConfigError, and what makes a model unloadable.

    `loading` is entered while the model loads, and gives what is told how far that is. `spawned`: an engine process
    that was started ahead.
    """
    listener = listen(config.host, config.port, has_key=bool(parse_keys(config.api_key)))
    configure_logging(config.log_level)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Server(config, listener, loading or nullcontext(), spawned).run())


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: `_Server` decides what a signal means."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Server:
    def __init__(
        self,
        config: Config,
        listener: socket.socket,
        loading: AbstractContextManager[Report | None],
        spawned: Spawned | None,
    ) -> None:
        self._config = config
        self._listener = listener
        self._loading = loading
        self._spawned = spawned
        self._name = served_name(config)
        self._url = url_of(listener)
        self._notify_socket = notify_socket()
        self._stop = asyncio.Event()  # the first signal, or the engine died for good
        self._hurry = asyncio.Event()  # the second signal, or something that will not end
        self._is_loaded = False
        self._status = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        lifecycle, metrics = Lifecycle(), Metrics(self._name, headrace.__version__)
        engine = AsyncEngine(self._config, spawned=self._spawned)
        engine.subscribe(metrics.fold)
        engine.subscribe(lambda events: self._on_events(engine, events))
        http = _Http(_uvicorn_config(create_app(engine, self._config, metrics, lifecycle)))
        serving = asyncio.ensure_future(http.serve(sockets=[self._listener]))
        entry = RunningServer(os.getpid(), time.time(), self._url, self._name)
        try:
            with registered(cache_dir(self._config.cache_dir) / "run", entry):
                await self._load(engine)
                await self._stop.wait()
        finally:
            await self._leave(engine, lifecycle)
            http.should_exit = True
            http.force_exit = self._hurry.is_set()
            await serving
        if self._hurry.is_set():  # wait for no thread; the engine process sees its parent go, and goes too
            sys.stdout.flush()
            os._exit(self._status)
        return self._status

    async def _load(self, engine: AsyncEngine) -> None:
        """Returns when the engine is ready or a signal came. Raises the typed error that made loading fail."""
        notify(self._notify_socket, "STATUS=Loading the model")
        print(f"loading {self._name}; {self._url}/readyz shows the progress", flush=True)
        with self._loading as report:
            await engine.start()
            await _first(engine.wait_ready(report), self._stop.wait())
        if self._stop.is_set():
            return
        self._is_loaded = True
        gc.freeze()  # modules and vocabulary: never garbage, not worth looking at again
        gc.enable()
        notify(self._notify_socket, "READY=1\nSTATUS=Serving")
        print(banner(engine.summary, self._url, self._name, bool(parse_keys(self._config.api_key))), flush=True)
        await _first(self._report_self_test(engine), self._stop.wait())

    async def _report_self_test(self, engine: AsyncEngine) -> None:
        """Waits for the measurement that the engine makes on idle time, and says what came out."""
        if self._config.self_test:
            speed = await engine.wait_self_test()
            print(
                f"measured on this machine: {speed.prefill_tokens_per_s:.0f} tok/s of prompt, "
                f"{speed.decode_tokens_per_s:.0f} tok/s of one answer",
                flush=True,
            )

    async def _leave(self, engine: AsyncEngine, lifecycle: Lifecycle) -> None:
        """Lets running requests finish within the grace, then ends them with an error frame, then the engine."""
        notify(self._notify_socket, "STOPPING=1")
        lifecycle.drain()
        if lifecycle.live and engine.status().state == "ready":
            grace = self._config.shutdown_timeout
            print(f"finishing {lifecycle.live} requests within {grace:g} s; again to stop at once", flush=True)
            await _first(lifecycle.wait_idle(grace), self._hurry.wait())
        # A download or a read on another thread cannot be interrupted: it is left behind.
        patience_s = _CLOSE_S if engine.status().state == "ready" else _CLOSE_LOADING_S
        try:
            async with asyncio.timeout(patience_s):
                await _first(engine.close(0.0), self._hurry.wait())
        except TimeoutError:
            self._hurry.set()
        await _first(lifecycle.wait_idle(_FLUSH_S), self._hurry.wait())

    def _on_signal(self, number: int) -> None:
        if not self._stop.is_set():
            self._stop.set()
        elif not self._hurry.is_set():
            self._hurry.set()
            self._status = self._status or 128 + number
        else:
            os._exit(128 + number)

    def _on_events(self, engine: AsyncEngine, events: Sequence[Event]) -> None:
        """A crash loop has no way back: leave, and let whoever supervises us know."""
        died = any(event.kind is EventKind.ENGINE_DIED for event in events)
        if died and self._is_loaded and engine.status().state == "dead":
            log.critical("the engine is dead: %s", engine.status().error)
            self._status = 1
            self._stop.set()


def banner(summary: Mapping[str, str], url: str, model: str, has_key: bool) -> str:
    """What was chosen and why, where it listens, and a line to try at once."""
    width = max((len(label) for label in summary), default=0)
    lines = [f"  {label:<{width}}  {text}" for label, text in summary.items()]
    key = " -H 'Authorization: Bearer YOUR_KEY'" if has_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    return "\n".join([f"serving {model} at {url}/v1", *lines, "", f"  {curl}", ""])


async def _first(*works: Coroutine[Any, Any, Any]) -> None:
    """Waits until one is done and cancels the others. Raises what the one raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel(*tasks)


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(_FLUSH_S),
    )
