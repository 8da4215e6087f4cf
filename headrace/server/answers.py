"""From the engine's deltas to whole answers: merging the streams of several prompts, folding deltas, counting usage.

Knows neither JSON nor HTTP responses. `FinishReason.ABORT` and `ERROR` never reach a client as a finish reason: they
become exceptions here.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from headrace.base.errors import EngineDeadError, RequestFailedError
from headrace.core.request import FinishReason
from headrace.engine.generation import Delta, GenerationRequest, TokenInfo
from headrace.server.errors import ClientDisconnectedError
from headrace.server.service import Service

T = TypeVar("T")

_MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's own stand-in

Indexed = tuple[int, Delta]  # choice index over all prompts, and what it gained


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@dataclass(slots=True)
class Answer:
    """One choice, gathered."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenInfo] = field(default_factory=list)
    prompt_logprobs: list[TokenInfo] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs or ())
        self.prompt_logprobs.extend(delta.prompt_logprobs or ())
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


class Counter:
    """Usage over all choices of all prompts: a prompt counts once however many answers it got."""

    def __init__(self, prompts: Sequence[int], n: int) -> None:
        """`prompts`: token counts."""
        self._num_prompt_tokens = sum(prompts)
        self._num_output_tokens = [0] * (len(prompts) * n)
        self._num_cached_tokens = [0] * len(prompts)
        self._n = n

    def add(self, index: int, delta: Delta) -> None:
        self._num_output_tokens[index] = delta.num_output_tokens
        prompt = index // self._n
        self._num_cached_tokens[prompt] = max(self._num_cached_tokens[prompt], delta.num_cached_tokens)

    def usage(self) -> Usage:
        prompt, output = self._num_prompt_tokens, sum(self._num_output_tokens)
        return Usage(prompt, output, prompt + output, PromptTokensDetails(sum(self._num_cached_tokens)))


def finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


async def start(service: Service, requests: Sequence[GenerationRequest]) -> AsyncGenerator[Indexed, None]:
    """Submits the requests: all of them or, where one is refused, none. Closing the result aborts them."""
    streams: list[AsyncIterator[Delta]] = []
    try:
        for request in requests:
            streams.append(service.engine.generate(request))
    except BaseException:
        for stream in streams:
            await _close(stream)
        raise
    return _merge(streams, requests[0].n)


async def _merge(streams: Sequence[AsyncIterator[Delta]], n: int) -> AsyncGenerator[Indexed, None]:
    """Deltas of all streams as they come. The first failure ends them all."""
    if len(streams) == 1:
        try:
            async for delta in streams[0]:
                _check(delta)
                yield delta.choice, delta
        finally:
            await _close(streams[0])
        return
    queue: asyncio.Queue[Indexed | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_pump(stream, i * n, queue)) for i, stream in enumerate(streams)]
    open_streams = len(tasks)
    try:
        while open_streams:
            item = await queue.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                _check(item[1])
                yield item
    finally:
        await cancel(*tasks)


async def _pump(
    stream: AsyncIterator[Delta], first: int, queue: "asyncio.Queue[Indexed | BaseException | None]"
) -> None:
    try:
        async for delta in stream:
            queue.put_nowait((first + delta.choice, delta))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)
    finally:
        await _close(stream)


async def _close(stream: AsyncIterator[Delta]) -> None:
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()


def _check(delta: Delta) -> None:
    if delta.finish_reason == FinishReason.ERROR:
        raise RequestFailedError("The engine could not finish this request", code="request_failed")
    if delta.finish_reason == FinishReason.ABORT:
        raise EngineDeadError("The server ended this request before it was done", code="request_aborted")


async def collect(deltas: AsyncGenerator[Indexed, None], counter: Counter, num_choices: int) -> list[Answer]:
    answers = [Answer() for _ in range(num_choices)]
    async with aclosing(deltas):
        async for index, delta in deltas:
            answers[index].add(delta)
            counter.add(index, delta)
    if any(answer.finish_reason is None for answer in answers):
        raise RequestFailedError("The engine ended this request early", code="request_failed")
    return answers


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away (then raises ClientDisconnectedError)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        await cancel(task, gone)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels the tasks and waits until their clean-up is done, whatever they end with."""
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
