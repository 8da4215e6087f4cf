"""The load generator against a scripted server whose timing is known."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from headrace.base.errors import ConfigError, HeadraceError
from headrace.bench.client import LoadError, Target, fetch
from headrace.bench.load import Arrival, Outcome, Run, Workload, prompts, run, served_model
from headrace.bench.report import parse_goodput, parse_percentiles, summarize, table

WORKLOAD = Workload(6, 10, 3, 0.0, 0, 7, chat=False, ignore_eos=True, model="toy")


def sse(*payloads: object) -> bytes:
    return b"".join(b"data: " + (p if isinstance(p, bytes) else json.dumps(p).encode()) + b"\n\n" for p in payloads)


GOOD = sse(
    {"choices": [{"text": "a"}]},
    {"choices": [{"text": "b"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
    },
    b"[DONE]",
)


@asynccontextmanager
async def server(answer: Callable[[int], tuple[int, bytes]]) -> AsyncIterator[tuple[Target, list[int]]]:
    """Answers each request with (status, body); records how many were in flight at each start."""
    in_flight: list[int] = []
    active = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal active
        active += 1
        in_flight.append(active)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        status, body = answer(len(in_flight))
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        active -= 1
        writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield Target("127.0.0.1", listening.sockets[0].getsockname()[1], "", False), in_flight
    finally:
        listening.close()
        await listening.wait_closed()


def drive(answer: Callable[[int], tuple[int, bytes]], arrival: Arrival) -> tuple[Run, list[int]]:
    async def main() -> tuple[Run, list[int]]:
        async with server(answer) as (target, in_flight):
            return await run(target, WORKLOAD, arrival, lambda done, total: None), in_flight

    return asyncio.run(main())


def test_usage_and_times_are_counted() -> None:
    measured, _ = drive(lambda n: (200, GOOD), Arrival(math.inf, 0))
    result = summarize(measured, [50, 99], {"ttft": 60.0})
    assert result["completed"] == 6
    assert (result["prompt_tokens"], result["output_tokens"], result["cached_tokens"]) == (60, 12, 24)
    assert result["goodput_share"] == 1.0
    assert 0 <= result["ttft"]["p50"] <= result["ttft"]["p99"] <= result["ttft"]["max"]
    assert "output tok/s" in table(result)
    json.dumps(result)


def test_closed_loop_holds_its_bound() -> None:
    _, in_flight = drive(lambda n: (200, GOOD), Arrival(math.inf, 2))
    assert max(in_flight) <= 2


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"error": "full"}', 503, "status 503"),
        (sse({"error": {"message": "engine died"}}), 200, "engine died"),
        (sse({"choices": [{"text": "a"}]}), 200, "without [DONE]"),
        (sse(b"[DONE]"), 200, "no token came"),
        (sse(b"{"), 200, "truncated"),
    ],
)
def test_failures_are_failures(body: bytes, status: int, message: str) -> None:
    measured, _ = drive(lambda n: (status, body), Arrival(math.inf, 0))
    result = summarize(measured, [50], {"ttft": 1.0})
    assert result["completed"] == 0
    assert result["failed"] == 6
    assert result["goodput_share"] == 0.0
    assert message in next(iter(result["errors"]))
    assert "error x 6" in table(result)


def test_goodput_counts_only_requests_that_meet_every_target() -> None:
    fast = Outcome(0.0, 0.0, first=0.1, ended=0.3, chunk_times=[0.1, 0.3], output_tokens=3)
    slow = Outcome(0.0, 0.0, first=0.9, ended=1.0, chunk_times=[0.9, 1.0], output_tokens=3)
    result = summarize(Run([fast, slow], 1.0, 0.0), [50], {"ttft": 0.5, "tpot": 0.2})
    assert result["goodput_share"] == 0.5
    assert fast.tpot == pytest.approx(0.1)


def test_prompts_come_from_the_seed_alone() -> None:
    assert list(prompts(WORKLOAD)) == list(prompts(WORKLOAD))
    shared = list(prompts(Workload(3, 5, 5, 0.5, 4, 1, chat=False, ignore_eos=True, model="m")))
    assert len({text.split()[0] for text, _ in shared}) == 1
    assert all(len(text.split()) - 4 in range(2, 9) for text, _ in shared)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://[::1", "http://x:99999", "http://x:port"])
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(LoadError, match="is not an http or https URL"):
        Target.parse(url, "")


def test_unreachable_servers_are_named() -> None:
    with pytest.raises(LoadError, match=r"cannot connect to 127\.0\.0\.1:9"):
        asyncio.run(fetch(Target("127.0.0.1", 9, "", False), "GET", "/"))
    with pytest.raises(HeadraceError, match="give --model"):
        asyncio.run(served_model(Target("127.0.0.1", 9, "", False)))


def test_urls_with_and_without_v1_are_one_target() -> None:
    assert Target.parse("http://h:1/v1", "k") == Target.parse("http://h:1", "k")
    assert Target.parse("h:1", "k").headers == {"authorization": "Bearer k"}


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "speed:3", "ttft:-1"])
def test_goodput_errors(text: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goodput(text)


def test_percentile_errors() -> None:
    assert parse_percentiles("50,99.9") == [50, 99.9]
    with pytest.raises(ConfigError, match="--metric-percentiles"):
        parse_percentiles("50,p99")
