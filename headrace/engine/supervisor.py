"""Keeps an engine process alive: starts it, notices that it is gone, starts it again, and gives up on a crash loop.

    loading -> ready -> restarting -> ready ...
       |                    |
       +--> dead <----------+      the first load failed, or too many deaths within a while

Knows no requests: `on_death` tells its owner, who decides what becomes of them. An engine that cannot load the first
time is not tried again: a corrupt file or too little memory do not heal by themselves.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.base.config import Config
from headrace.base.errors import (
    ConfigError,
    EngineDeadError,
    FetchError,
    HeadraceError,
    ModelNotFoundError,
    ModelTooLargeError,
)
from headrace.engine.child import EngineProcess, Watch
from headrace.engine.generation import EngineStatus
from headrace.engine.link import Job
from headrace.engine.messages import Failed, FromEngine, Loading, Ready, ToEngine
from headrace.engine.spawn import Spawned

# The typed errors that a child can name; what it names otherwise stays a HeadraceError.
_KINDS: tuple[type[HeadraceError], ...] = (ConfigError, FetchError, ModelNotFoundError, ModelTooLargeError)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """More than `max_deaths` within `window_s` seconds is a crash loop. Waits double from the second death on."""

    max_deaths: int = 5
    window_s: float = 60.0
    first_wait_s: float = 0.25
    longest_wait_s: float = 8.0

    def wait_s(self, num_recent_deaths: int) -> float:
        """Seconds before the restart after that many deaths; at once after the first."""
        if num_recent_deaths <= 1:
            return 0.0
        return min(self.longest_wait_s, self.first_wait_s * 2.0 ** (num_recent_deaths - 2))


@dataclass(frozen=True, slots=True)
class Listener:
    """Whom a supervisor tells."""

    on_message: Callable[[FromEngine], None]
    on_death: Callable[[str, bool], None]  # (why, whether another process follows)


@dataclass(slots=True)
class Supervisor:
    config: Config
    listener: Listener
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    watch: Watch = field(default_factory=Watch)
    spawned: Spawned | None = None  # the first process, when somebody has started it ahead
    epoch: int = 0
    error: HeadraceError | None = None  # why it is dead, or why it restarts
    _state: str = "loading"
    _phase: str = ""
    _fraction: float = 0.0
    _model_path: str = ""
    _process: EngineProcess | None = None
    _deaths: deque[float] = field(default_factory=deque)
    _timer: asyncio.TimerHandle | None = None
    _settled: asyncio.Event = field(default_factory=asyncio.Event)  # ready or dead, for the first time

    @property
    def is_ready(self) -> bool:
        return self._state == "ready"

    def status(self) -> EngineStatus:
        error = "" if self.error is None else str(self.error)
        pid = "" if self._process is None else str(self._process.pid)
        details = {"pid": pid, "epoch": str(self.epoch), "restarts": str(max(0, self.epoch - 1))}
        return EngineStatus(self._state, self._phase, self._fraction, error, details)

    def report(self, phase: str, fraction: float) -> None:
        """Progress of work that comes before the process, such as a download."""
        self._phase, self._fraction = phase, fraction

    def start(self, model_path: str) -> None:
        self._model_path = model_path
        self._spawn()

    def give_up(self, error: HeadraceError) -> None:
        """Nothing can be started."""
        self._state, self.error = "dead", error
        self._settled.set()

    async def wait_ready(self) -> None:
        """Waits for the first load. Raises the typed error that ended it."""
        await self._settled.wait()
        if self._state == "dead" and self.error is not None:
            raise self.error

    def send(self, message: ToEngine) -> None:
        if self._process is not None:
            self._process.send(message)

    async def stop(self, grace_s: float) -> None:
        """Ends the process and starts no other. Whoever waits for readiness gets EngineDeadError."""
        if self._timer is not None:
            self._timer.cancel()
        if self._state != "dead":
            self.give_up(EngineDeadError("the engine was shut down", code="engine_stopped"))
        process, self._process = self._process, None
        if process is not None:
            await process.stop(grace_s)

    def _spawn(self) -> None:
        self._timer = None
        self.epoch += 1
        self._phase, self._fraction = "starting the engine process", 0.0
        job = Job(self.config, self._model_path, self.epoch, self.watch.interval_s)
        try:
            spawned, self.spawned = self.spawned or Spawned(self.config.backend), None
            self._process = EngineProcess(job, spawned, self._on_message, self._on_death, self.watch)
        except OSError as error:
            self._on_death(f"the engine process could not be started: {error}")

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Loading):
            self._phase, self._fraction = message.phase, message.fraction
        elif isinstance(message, Ready):
            self._state, self._phase, self._fraction, self.error = "ready", "", 1.0, None
        elif isinstance(message, Failed):
            known = {kind.__name__: kind for kind in _KINDS}
            self.error = known.get(message.kind, HeadraceError)(message.error)
        self.listener.on_message(message)
        if isinstance(message, Ready):
            self._settled.set()

    def _on_death(self, reason: str) -> None:
        self._process = None
        if self.error is None or str(self.error) != reason:
            self.error = EngineDeadError(reason, code="engine_died")
        now = asyncio.get_running_loop().time()
        self._deaths.append(now)
        while self._deaths[0] < now - self.policy.window_s:
            self._deaths.popleft()
        if not self._settled.is_set():
            self.give_up(self.error)
        elif len(self._deaths) > self.policy.max_deaths:
            loop = (
                f"the engine died {len(self._deaths)} times within {self.policy.window_s:g} s; the last time: {reason}"
            )
            self.give_up(EngineDeadError(loop, code="engine_dead"))
        else:
            self._state, self._phase, self._fraction = "restarting", "waiting to restart", 0.0
            wait_s = self.policy.wait_s(len(self._deaths))
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._spawn)
        self.listener.on_death(reason, self._state == "restarting")
