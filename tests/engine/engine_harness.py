"""A real engine process behind a real AsyncEngine, on the fake model, for the tests of this folder."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from headrace.base.config import Config
from headrace.core.events import Event, EventKind
from headrace.core.request import SamplingParams
from headrace.engine.child import Watch
from headrace.engine.client import AsyncEngine
from headrace.engine.generation import Delta, GenerationRequest
from headrace.engine.messages import Gauges
from headrace.engine.supervisor import RestartPolicy

_ids = count()


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """One event loop; a test that hangs fails instead."""

    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await main

    return asyncio.run(bounded())


@asynccontextmanager
async def running(
    cache: Path, policy: RestartPolicy | None = None, watch: Watch | None = None, **config: Any
) -> AsyncIterator[AsyncEngine]:
    """A ready engine, closed at the end."""
    options = {"backend": "fake", "self_test": False, "cache_dir": str(cache), **config}
    engine = AsyncEngine(Config(**options), restart_policy=policy, watch=watch)
    try:
        await engine.start()
        await engine.wait_ready()
        yield engine
    finally:
        await engine.close()


def ask(engine: AsyncEngine, prompt: str | list[int] = "Once", n: int = 1, **options: Any) -> GenerationRequest:
    """Greedy, 16 tokens and endless unless told otherwise. Fields of SamplingParams and of GenerationRequest mix."""
    stop = tuple(options.pop("stop", ()))
    extra = {name: options.pop(name) for name in ("include_stop_str_in_output", "cache_salt") if name in options}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, **options})
    ids = prompt if isinstance(prompt, list) else engine.tokenizer.encode(prompt)
    return GenerationRequest(f"test-{next(_ids)}", ids, params, n=n, stop=stop, **extra)


def endless(engine: AsyncEngine, prompt: str = "Once") -> GenerationRequest:
    """Runs until it is stopped: thousands of steps."""
    return ask(engine, prompt, max_tokens=engine.max_model_len - len(prompt.encode()))


class SharedEngine:
    """One engine on one event loop for many tests: a test is a coroutine that gets the engine."""

    def __init__(self, cache: Path) -> None:
        self._runner = asyncio.Runner()
        self._running = running(cache)
        self._engine = self._runner.run(self._running.__aenter__())

    def run(self, main: Callable[[AsyncEngine], Coroutine[Any, Any, None]]) -> None:
        """Runs one test, after which the engine must hold nothing."""

        async def bounded() -> None:
            async with asyncio.timeout(60):
                watcher = Watcher(self._engine)
                await main(self._engine)
                assert self._engine.num_live == 0
                assert (await watcher.until_idle()).kv_blocks_used == 0

        self._runner.run(bounded())

    def close(self) -> None:
        self._runner.run(self._running.__aexit__(None, None, None))
        self._runner.close()


@dataclass
class Answer:
    text: str = ""
    token_ids: list[int] | None = None
    last: Delta | None = None
    deltas: list[Delta] | None = None


async def collect(engine: AsyncEngine, request: GenerationRequest, choice: int = 0) -> Answer:
    answer = Answer(token_ids=[], deltas=[])
    async for delta in engine.generate(request):
        if delta.choice == choice:
            answer.text += delta.text
            answer.token_ids += delta.token_ids
            answer.deltas.append(delta)
            answer.last = delta
    return answer


class Watcher:
    """Waits for things that events tell, without polling."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.events: list[Event] = []
        self._engine = engine
        self._news = asyncio.Event()
        engine.subscribe(self._take)

    def _take(self, events: list[Event]) -> None:
        self.events += events
        self._news.set()

    def count(self, kind: EventKind, request_id: str | None = None) -> int:
        return sum(event.kind is kind and request_id in (None, event.request_id) for event in self.events)

    async def until(self, kind: EventKind, request_id: str | None = None, at_least: int = 1) -> None:
        while self.count(kind, request_id) < at_least:
            self._news.clear()
            await self._news.wait()

    async def until_idle(self) -> Gauges:
        """The engine says that it holds nothing. Idle engines say nothing, so this reads what it said last."""
        while self._engine.num_live or self._engine.gauges.num_running or self._engine.gauges.num_waiting:
            self._news.clear()
            await self._news.wait()
        return self._engine.gauges


def with_params(request: GenerationRequest, **changes: Any) -> GenerationRequest:
    return replace(request, request_id=f"test-{next(_ids)}", params=replace(request.params, **changes))
