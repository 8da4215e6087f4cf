"""Raw bytes on a real socket: heads without end, garbage, half requests, clients that hang up."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Generator

import pytest
import uvicorn
from fake_engine import FakeEngine
from test_streaming import run

from headrace.base.config import Config
from headrace.server import protocol
from headrace.server.app import create_app
from headrace.server.protocol import MAX_HEAD_BYTES, MAX_HEADERS, BoundedHttp

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[int]:
    """A port on which the application listens."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(engine, Config())
    config = uvicorn.Config(
        app, http=BoundedHttp, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    server = Quiet(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def ask(port: int, data: bytes) -> bytes:
    """Everything that the server answers to `data` until it closes."""
    async with connected(port) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(data), 16384):
                writer.write(data[start : start + 16384])
                await writer.drain()
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                answer += piece
        return answer


def post(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"host: x", b"connection: close", b"content-length: %d" % len(body)]
    return b"\r\n".join([*lines, *headers, b"", body])


HEADS = [
    b"GET /livez HTTP/1.1\r\nx-long: " + b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nx-endless: " + b"a" * (8 * MAX_HEAD_BYTES),
    b"GET /" + b"a" * (8 * MAX_HEAD_BYTES),
    b"GET /livez HTTP/1.1\r\n" + b"".join(b"x-%d: a\r\n" % i for i in range(MAX_HEADERS + 1)) + b"\r\n",
]


@pytest.mark.parametrize("head", HEADS, ids=["long", "endless", "path", "many"])
def test_a_head_over_the_bounds_is_refused_and_the_connection_closed(head: bytes) -> None:
    async def test() -> None:
        async with serving(FakeEngine()) as port:
            answer = await ask(port, head)
            # A client that is still sending may see a reset instead of the answer.
            assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""
            assert (await ask(port, b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).startswith(
                b"HTTP/1.1 200"
            )

    run(test)


def test_the_refusal_of_a_head_has_openais_shape() -> None:
    async def test() -> None:
        async with serving(FakeEngine()) as port:
            answer = await ask(port, HEADS[3])
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"content-length: %d" % len(body) in head
            assert json.loads(body)["error"]["code"] == "head_too_large"

    run(test)


@pytest.mark.parametrize("start", [b"", b"GET /livez HTTP/1.1\r\nhost:"], ids=["silent", "slow"])
def test_a_head_that_does_not_come_closes_the_connection(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.05)

    async def test() -> None:
        async with serving(FakeEngine()) as port, connected(port) as (reader, writer):
            writer.write(start)
            assert await reader.read() == b""

    run(test)


@pytest.mark.parametrize("data", [b"\x00" * 100, b"\x16\x03\x01\x02\x00", b"HELLO\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"])
def test_what_is_no_http_is_refused(data: bytes) -> None:
    async def test() -> None:
        async with serving(FakeEngine()) as port:
            head, _, body = (await ask(port, data)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == "invalid_http"

    run(test)


def test_a_body_announced_too_large_is_refused_before_it_is_sent() -> None:
    async def test() -> None:
        async with serving(FakeEngine()) as port, connected(port) as (reader, writer):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")

    run(test)


@pytest.mark.parametrize("size", [MAX_HEAD_BYTES - 100, MAX_HEAD_BYTES + 1, 3 * MAX_HEAD_BYTES, 2_000_000])
def test_a_body_counts_as_no_head_however_it_is_cut_into_reads(size: int) -> None:
    async def test() -> None:
        async with serving(FakeEngine(max_model_len=10 * size)) as port, connected(port) as (reader, writer):
            for turn in range(3):  # on one connection: what one request leaves must not burden the next
                body = json.dumps({"prompt": "a" * size}).encode()
                writer.write(post(body).replace(b"connection: close", b"connection: keep-alive"))
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200"), (turn, head)
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))

    run(test)


def test_requests_on_one_connection_are_answered_in_order() -> None:
    async def test() -> None:
        async with serving(FakeEngine()) as port:
            first = b"GET /livez HTTP/1.1\r\nhost: x\r\nx-request-id: first\r\n\r\n"
            answer = await ask(port, first + post(b'{"prompt": "a"}', b"x-request-id: second"))
            assert answer.count(b"HTTP/1.1 200") == 2 and answer.index(b"first") < answer.index(b"second")

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_a_hang_up_aborts_what_runs(stream: bool) -> None:
    async def test() -> None:
        engine = FakeEngine(hold_at=2)
        async with serving(engine) as port:
            async with connected(port) as (_, writer):
                writer.write(post(json.dumps({"prompt": "a", "stream": stream}).encode()))
                await engine.held.wait()
            await engine.idle.wait()

    run(test)


def test_a_client_that_stops_reading_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.server import sse

    monkeypatch.setattr(sse, "_MAX_SEND_S", 0.05)

    async def test() -> None:
        engine = FakeEngine(text="x" * 60_000, max_model_len=100_000, hold_at=0)
        engine.hold.set()
        async with serving(engine) as port, connected(port) as (reader, writer):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            body = {"prompt": "a", "stream": True, "max_tokens": 60_000}
            writer.write(post(json.dumps(body).encode()))
            await engine.held.wait()
            await engine.idle.wait()

    run(test)
