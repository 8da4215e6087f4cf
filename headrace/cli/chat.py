"""The conversation of `headrace run`: streams answers, keeps the messages, lets Ctrl-C stop an answer."""

import asyncio
import signal
import sys
import time
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
    loop = asyncio.get_running_loop()
    while True:
        try:
            text = await loop.run_in_executor(None, input, "> ")
        except (EOFError, KeyboardInterrupt, asyncio.CancelledError):
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
        """Prints one answer as it comes. Returns the exit status."""
        self._messages.append({"role": "user", "content": text})
        try:
            request = await self._request(text)
            shown = await self._stream(request)
        except RequestError as error:
            self._messages.pop()
            print(f"error: {error}", file=sys.stderr)
            return 1
        self._messages.append({"role": "assistant", "content": shown})
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

    async def _stream(self, request: GenerationRequest) -> str:
        started, first, count, cached = time.monotonic(), 0.0, 0, 0
        pieces: list[str] = []
        reason = FinishReason.ABORT
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            if task:
                task.cancel()

        loop.add_signal_handler(signal.SIGINT, stop)
        try:
            async for delta in self._engine.generate(request):
                first = first or time.monotonic()
                count, cached = delta.num_output_tokens, delta.num_cached_tokens or cached
                pieces.append(delta.text)
                print(delta.text, end="", flush=True)
                reason = delta.finish_reason or reason
        except asyncio.CancelledError:
            if not stopped or not task:
                raise
            task.uncancel()
        finally:
            loop.remove_signal_handler(signal.SIGINT)
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
        return "".join(pieces)
