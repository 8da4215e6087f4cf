"""Puts load on an OpenAI-compatible server: when requests start, what they say, and what each of them saw.

Closed loop: `max_concurrency` requests are always in flight. Open loop: requests start at `request_rate` per second
with exponential gaps (a Poisson process) whatever the server does, which is how users arrive.
"""

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.base.errors import HeadraceError
from headrace.bench.client import LoadError, Target, fetch, server_sent_events

# Short words that are one token in practically every vocabulary when a space stands before them.
_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
you were her all she there would their we him been has when who will more no if out so said what up its about into
than them can only other new some could time these two may then do first any my now such like our over man me even
most made after also did many before must through back years where much your way well down should because each just
those people how too little state good very make world still own see men work long get here between both life being
under never day same another know while last might us great old year off come since against go came right used take
three
"""
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent. Lengths are in words, which are about one token each; results count the server's own usage."""

    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float  # lengths are drawn from [len * (1 - ratio), len * (1 + ratio)]
    prefix_len: int  # words that every prompt shares
    seed: int
    chat: bool
    ignore_eos: bool
    model: str


@dataclass(frozen=True, slots=True)
class Arrival:
    request_rate: float  # per second; inf: all at once
    max_concurrency: int  # 0: unbounded


@dataclass(slots=True)
class Outcome:
    """What one request saw. Times are monotonic seconds."""

    started: float
    planned: float  # when the open loop wanted it to start
    first: float = math.nan
    ended: float = math.nan
    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.first - self.started

    @property
    def latency(self) -> float:
        return self.ended - self.started

    @property
    def tpot(self) -> float:
        """Mean seconds per output token after the first."""
        return (self.ended - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan


@dataclass(frozen=True, slots=True)
class Run:
    outcomes: list[Outcome]
    seconds: float
    cpu_seconds: float  # the generator's own


def prompts(workload: Workload) -> Iterator[tuple[str, int]]:
    """(prompt text, output tokens) for each request, from the seed alone."""
    draw = random.Random(workload.seed)
    shared = " ".join(draw.choices(WORDS, k=workload.prefix_len))
    for _ in range(workload.num_prompts):
        words = draw.choices(WORDS, k=_spread(draw, workload.input_len, workload.range_ratio))
        yield f"{shared} {' '.join(words)}".strip(), _spread(draw, workload.output_len, workload.range_ratio)


def _spread(draw: random.Random, length: int, ratio: float) -> int:
    return max(1, draw.randint(math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))))


async def served_model(target: Target) -> str:
    """The name of the first model that the server lists. Raises HeadraceError when it lists none."""
    try:
        _, body = await fetch(target, "GET", "/v1/models")
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (LoadError, msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise HeadraceError(f"{target.host}:{target.port} does not list a model: {error}; give --model") from error


async def run(target: Target, workload: Workload, arrival: Arrival, report: Callable[[int, int], None]) -> Run:
    """Sends the whole workload and returns what each request saw. `report` gets (finished, all)."""
    limit = asyncio.Semaphore(arrival.max_concurrency) if arrival.max_concurrency else None
    gaps = random.Random(workload.seed + 1)
    outcomes: list[Outcome] = []
    tasks: set[asyncio.Task[None]] = set()
    finished = itertools.count(1)
    cpu, start = time.process_time(), time.monotonic()
    planned = start

    async def one(prompt: str, output_len: int, due: float) -> None:
        try:
            outcomes.append(await _one(target, workload, prompt, output_len, due))
        finally:
            if limit:
                limit.release()
            report(next(finished), workload.num_prompts)

    for prompt, output_len in prompts(workload):
        if limit:
            await limit.acquire()
        await asyncio.sleep(max(0.0, planned - time.monotonic()))
        task = asyncio.create_task(one(prompt, output_len, planned))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if math.isfinite(arrival.request_rate):
            planned += gaps.expovariate(arrival.request_rate)
    await asyncio.gather(*tasks)
    return Run(outcomes, time.monotonic() - start, time.process_time() - cpu)


def _body(workload: Workload, prompt: str, output_len: int) -> tuple[str, bytes]:
    body: dict[str, Any] = {"model": workload.model, "max_tokens": output_len, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if workload.ignore_eos:
        body["ignore_eos"] = True
    if workload.chat:
        body["messages"] = [{"role": "user", "content": prompt}]
        return "/v1/chat/completions", msgspec.json.encode(body)
    body["prompt"] = prompt
    return "/v1/completions", msgspec.json.encode(body)


async def _one(target: Target, workload: Workload, prompt: str, output_len: int, due: float) -> Outcome:
    path, body = _body(workload, prompt, output_len)
    outcome = Outcome(started=time.monotonic(), planned=due)
    done = False
    try:
        async for arrived, payload in server_sent_events(target, path, body):
            if payload == b"[DONE]":
                done = True
                continue
            _take(outcome, arrived, msgspec.json.decode(payload))
        if not done:
            outcome.error = outcome.error or "the stream ended without [DONE]"
    except (LoadError, msgspec.DecodeError) as error:
        outcome.error = str(error)
    outcome.ended = outcome.chunk_times[-1] if outcome.chunk_times else time.monotonic()
    if not outcome.error and not outcome.chunk_times:
        outcome.error = "no token came"
    return outcome


def _take(outcome: Outcome, arrived: float, chunk: dict[str, Any]) -> None:
    if chunk.get("error"):
        outcome.error = str(chunk["error"])
        return
    for choice in chunk.get("choices") or []:
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text:
            if math.isnan(outcome.first):
                outcome.first = arrived
            outcome.chunk_times.append(arrived)
    usage = chunk.get("usage")
    if usage:
        outcome.prompt_tokens = usage.get("prompt_tokens", 0)
        outcome.output_tokens = usage.get("completion_tokens", 0)
        with suppress(AttributeError):
            outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
