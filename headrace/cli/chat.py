"""The conversation of `headrace run`: streams answers, keeps the messages, lets Ctrl-C stop an answer."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

from headrace.base.config import Config
from headrace.base.errors import RequestError
from headrace.cli.progress import loading
from headrace.cli.run import RunOptions
from headrace.core.request import FinishReason
from headrace.engine.client import AsyncEngine
from headrace.engine.generation import GenerationRequest

_HELP = "/clear forgets the conversation, /exit leaves, Ctrl-C stops an answer"
_LINE_BYTES = 1 << 16  # more than a terminal gathers in one line
_INTERRUPTED = 130


async def chat(config: Config, own: RunOptions, prompt: str | None) -> int:
    """Starts an engine, answers `prompt` once or converses until the end of input. Returns the exit status."""
    engine = AsyncEngine(config)
    try:
        await _start(engine)
        conversation = _Chat(engine, own)
        if prompt is not None:
            return await conversation.answer(prompt)
        await _converse(conversation, config.model)
        return 0
    finally:
        await engine.close(0.0)


async def _start(engine: AsyncEngine) -> None:
    with loading() as report:
        await engine.start()
        await engine.wait_ready(report)


async def _converse(chat: "_Chat", model: str) -> None:
    print(f"{model}: {_HELP}")
    while True:
        text = await _line()
        if text is None:
            print()
            return
        match text.strip():
            case "":
                continue
            case "/exit" | "/quit" | "/bye":
                return
            case "/clear":
                chat.clear()
            case "/help" | "/?":
                print(_HELP)
            case command if command.startswith("/") and " " not in command:
                print(f"unknown command {command}: {_HELP}")
            case _:
                await chat.answer(text)


async def _line() -> str | None:
    """What the terminal gives when a line is done; None at its end or at Ctrl-C.

    Nothing but the event loop waits: a thread that reads a terminal cannot be interrupted.
    """
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()

    def settle(has_line: bool) -> None:
        if not ready.done():
            ready.set_result(has_line)

    loop.add_reader(sys.stdin.fileno(), settle, True)
    try:
        with _on_interrupt(lambda: settle(False)):
            print("> ", end="", flush=True)
            has_line = await ready
    finally:
        loop.remove_reader(sys.stdin.fileno())
    data = os.read(sys.stdin.fileno(), _LINE_BYTES) if has_line else b""
    return data.decode(errors="replace") if data else None


@contextmanager
def _on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C does `act`, and nothing else, while the block runs."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Chat:
    """The conversation so far, and how to go on."""

    def __init__(self, engine: AsyncEngine, own: RunOptions) -> None:
        self._engine = engine
        self._own = own
        self._messages: list[dict[str, Any]] = []
        self.clear()

    def clear(self) -> None:
        self._messages = [{"role": "system", "content": self._own.system}] if self._own.system else []

    async def answer(self, text: str) -> int:
        """Prints one answer as it comes, until it ends or Ctrl-C ends it. Returns the exit status."""
        text = text.encode(errors="surrogateescape").decode(errors="replace")  # an argument that was no UTF-8
        self._messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        work = asyncio.ensure_future(self._answer(text, pieces))
        with _on_interrupt(work.cancel):
            await asyncio.wait({work})
        status = _INTERRUPTED if work.cancelled() else work.result()
        if pieces:
            self._messages.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self._messages.pop()
        return status

    async def _answer(self, text: str, pieces: list[str]) -> int:
        try:
            await self._stream(await self._request(text), pieces)
        except RequestError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0

    async def _request(self, text: str) -> GenerationRequest:
        engine, own = self._engine, self._own
        if own.raw:
            tokens = await engine.encode(text)
        else:
            tokens = await engine.encode_chat(self._messages)
        # At least 1, so that a prompt which fills the context is refused by the engine, with both numbers.
        changes: dict[str, Any] = {"max_tokens": own.max_tokens or max(1, engine.max_model_len - len(tokens))}
        if own.temperature >= 0:
            changes["temperature"] = own.temperature
        if own.top_p >= 0:
            changes["top_p"] = own.top_p
        params = replace(engine.default_params(), **changes)
        return GenerationRequest(f"run-{uuid4().hex}", tokens, params)

    async def _stream(self, request: GenerationRequest, pieces: list[str]) -> None:
        """Prints what comes and keeps it in `pieces`, also what came before an interruption or a failure."""
        started, first, count, cached = time.monotonic(), 0.0, 0, 0
        reason: FinishReason | None = None
        try:
            async for delta in self._engine.generate(request):
                first = first or time.monotonic()
                count, cached = delta.num_output_tokens, delta.num_cached_tokens or cached
                pieces.append(delta.text)
                print(delta.text, end="", flush=True)
                reason = delta.finish_reason
        finally:
            print()
            if reason == FinishReason.LENGTH:
                print("[the answer reached its token limit]", file=sys.stderr)
            if self._own.stats and count:
                ended = time.monotonic()
                speed = (count - 1) / (ended - first) if count > 1 else 0.0
                print(
                    f"[{count} tokens, {speed:.1f} tok/s, first token after {1e3 * (first - started):.0f} ms, "
                    f"{len(request.prompt_token_ids)} prompt tokens, {cached} cached]",
                    file=sys.stderr,
                )
