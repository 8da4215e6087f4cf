"""The kinds of load that servers are compared on, and the numbers that each gives.

Prompts are words of one token each, drawn from the work and the repeat alone: every server gets the same, and no repeat
finds the prompt of another in a cache. Everything goes through /v1/completions as a stream, greedy, `ignore_eos`.
"""

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from headrace.bench.client import Target
from headrace.bench.load import Arrival, Outcome, Run, Workload, run, served_model


@dataclass(frozen=True)
class Size:
    """How much of each work: a small model gets more of it, so that a measurement is not over at once."""

    single: int  # requests
    waves: int  # requests of a stream, one after another
    later: int  # requests that share the prefix of the first


SMALL, LARGE, QUICK = Size(4, 2, 6), Size(1, 1, 3), Size(1, 1, 2)


@dataclass(frozen=True)
class Measure:
    """One number of a work, as the tables show it."""

    work: str
    key: str
    title: str
    higher_is_better: bool


MEASURES = (
    Measure("single", "tok_s", "1 stream, tok/s", True),
    Measure("ttft", "s", "TTFT of 2,048 tokens, s", False),
    Measure("streams16", "tok_s", "16 streams, tok/s", True),
    Measure("streams32", "tok_s", "32 streams, tok/s", True),
    Measure("mixed", "p99_s", "mixed: inter-token p99, s", False),
    Measure("mixed", "tok_s", "mixed: output tok/s", True),
    Measure("prefix", "s", "shared 1,024 tokens: later TTFT, s", False),
    Measure("cold", "s", "cold start to first token, s", False),
    Measure("memory", "mib", "summed PSS, MiB", False),
)
PERPLEXITY = Measure("perplexity", "perplexity", "perplexity", False)
WORKS = tuple(dict.fromkeys(measure.work for measure in (*MEASURES, PERPLEXITY)))


def score(work: str, values: dict[str, float]) -> float:
    """How good a result is, for choosing among settings: more is better. Mixed load counts speed per second of p99."""
    if work == "mixed":
        return values["tok_s"] / values["p99_s"]
    measure = next(measure for measure in (*MEASURES, PERPLEXITY) if measure.work == work)
    value = values[measure.key]
    return value if measure.higher_is_better else -value


class WorkError(Exception):
    """A request of the work failed."""


@dataclass(frozen=True)
class Measured:
    """`values` by key of the measures, the generator's share of one core, and what was counted on the way."""

    values: dict[str, float]
    generator_cpu_share: float
    detail: dict[str, Any]


def measure(work: str, target: Target, size: Size, repeat: int) -> Measured:
    """Raises WorkError when a request fails."""
    return asyncio.run(_measure(work, target, size, repeat))


async def first_token(target: Target) -> None:
    """One short request. Raises WorkError."""
    await _load(target, await served_model(target), Shape("first", 0, 1, 32, 1, 1))


async def _measure(work: str, target: Target, size: Size, repeat: int) -> Measured:
    model = await served_model(target)
    await _load(target, model, Shape(f"warm {work}", repeat, 1, 32, 8, 1))
    cpu, start = time.process_time(), time.monotonic()
    values, outcomes = await _CALLS[work](target, model, size, repeat)
    seconds = time.monotonic() - start
    detail = {
        "seconds": seconds,
        "requests": len(outcomes),
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in outcomes),
        "output_tokens": sum(outcome.output_tokens for outcome in outcomes),
    }
    return Measured(values, (time.process_time() - cpu) / seconds, detail)


@dataclass(frozen=True)
class Shape:
    """Closed-loop requests: `streams` at a time, lengths in tokens, drawn within a quarter of them when `staggered`."""

    name: str
    repeat: int
    requests: int
    prompt: int
    output: int
    streams: int
    staggered: bool = False
    prefix: int = 0


async def _load(target: Target, model: str, shape: Shape) -> Run:
    ratio = 0.25 if shape.staggered else 0.0
    seed = crc32(f"{shape.name} {shape.repeat}".encode())
    workload = Workload(shape.requests, shape.prompt, shape.output, ratio, shape.prefix, seed, False, True, model)
    found = await run(target, workload, Arrival(math.inf, shape.streams), lambda done, total: None)
    errors = [outcome.error for outcome in found.outcomes if outcome.error]
    if errors:
        raise WorkError(f"{len(errors)} of {shape.requests} requests failed: {errors[0]}")
    return found


Values = tuple[dict[str, float], list[Outcome]]


async def _single(target: Target, model: str, size: Size, repeat: int) -> Values:
    found = await _load(target, model, Shape("single", repeat, size.single, 32, 128, 1))
    return {"tok_s": 1 / statistics.median(outcome.tpot for outcome in found.outcomes)}, found.outcomes


async def _ttft(target: Target, model: str, size: Size, repeat: int) -> Values:
    found = await _load(target, model, Shape("ttft", repeat, size.waves, 2048, 4, 1))
    return {"s": statistics.median(outcome.ttft for outcome in found.outcomes)}, found.outcomes


async def _streams(target: Target, model: str, size: Size, repeat: int, streams: int) -> Values:
    name = f"streams{streams}"
    found = await _load(target, model, Shape(name, repeat, streams * size.waves, 128, 128, streams, staggered=True))
    return {"tok_s": sum(outcome.output_tokens for outcome in found.outcomes) / found.seconds}, found.outcomes


async def _streams16(target: Target, model: str, size: Size, repeat: int) -> Values:
    return await _streams(target, model, size, repeat, 16)


async def _streams32(target: Target, model: str, size: Size, repeat: int) -> Values:
    return await _streams(target, model, size, repeat, 32)


async def _mixed(target: Target, model: str, size: Size, repeat: int) -> Values:
    """Eight streams of 64 in and 64 out; half a second after them four long prompts arrive, with 16 out each."""

    async def long_prompts() -> Run:
        await asyncio.sleep(0.5)
        return await _load(target, model, Shape("mixed long", repeat, 4, 2048, 16, 4))

    start = time.monotonic()
    streams, long = await asyncio.gather(_load(target, model, Shape("mixed", repeat, 8, 64, 64, 8)), long_prompts())
    seconds = time.monotonic() - start
    gaps = [gap for outcome in streams.outcomes for gap in np.diff(outcome.chunk_times)]
    outcomes = streams.outcomes + long.outcomes
    tokens = sum(outcome.output_tokens for outcome in outcomes)
    return {"p99_s": float(np.percentile(gaps, 99)), "tok_s": tokens / seconds}, outcomes


async def _prefix(target: Target, model: str, size: Size, repeat: int) -> Values:
    shape = Shape("prefix", repeat, 1 + size.later, 32, 8, 1, prefix=1024)
    found = await _load(target, model, shape)
    later = found.outcomes[1:]
    return {"s": statistics.median(outcome.ttft for outcome in later)}, found.outcomes


_CALLS: dict[str, Callable[[Target, str, Size, int], Coroutine[Any, Any, Values]]] = {
    "single": _single,
    "ttft": _ttft,
    "streams16": _streams16,
    "streams32": _streams32,
    "mixed": _mixed,
    "prefix": _prefix,
}
