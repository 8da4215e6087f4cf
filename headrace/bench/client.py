"""A lean HTTP/1.1 client for streamed answers, so that the load generator takes little of the cores it measures on.

One connection per request, parsed by httptools. It knows server-sent events, not what is in them.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

_READ_BYTES = 1 << 16


class LoadError(Exception):
    """The server could not be reached, closed early or answered with an error status."""


@dataclass(slots=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    path_prefix: str
    tls: bool
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, base_url: str, api_key: str) -> "Target":
        """Raises LoadError for a URL that is not http or https."""
        try:
            parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
            port = parts.port
        except ValueError as error:
            raise LoadError(f"{base_url!r} is not an http or https URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise LoadError(f"{base_url!r} is not an http or https URL")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        return cls(parts.hostname, port or (443 if tls else 80), prefix, tls, headers)


class _Parser:
    """httptools callbacks: status, body pieces, end of message."""

    def __init__(self) -> None:
        self.body: list[bytes] = []
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.complete = True


async def request(target: Target, method: str, path: str, body: bytes = b"") -> AsyncIterator[tuple[int, float, bytes]]:
    """Yields (status, arrival in monotonic seconds, bytes) for each piece of the answer's body.

    Raises LoadError when the connection fails or closes before the answer is whole.
    """
    context = ssl.create_default_context() if target.tls else None
    try:
        reader, writer = await asyncio.open_connection(target.host, target.port, ssl=context)
    except OSError as error:
        raise LoadError(f"cannot connect to {target.host}:{target.port}: {error.strerror or error}") from error
    try:
        lines = [f"{method} {target.path_prefix}{path} HTTP/1.1", f"host: {target.host}:{target.port}"]
        lines += [f"{name}: {value}" for name, value in target.headers.items()]
        lines += ["content-type: application/json", f"content-length: {len(body)}", "connection: close", "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()
        events = _Parser()
        parser = httptools.HttpResponseParser(events)
        while not events.complete:
            data = await reader.read(_READ_BYTES)
            arrived = time.monotonic()
            if not data:
                raise LoadError("the server closed the connection before the answer was whole")
            parser.feed_data(data)
            if events.body:
                yield parser.get_status_code(), arrived, b"".join(events.body)
                events.body.clear()
    except (OSError, httptools.HttpParserError) as error:
        raise LoadError(f"broken answer: {error}") from error
    finally:
        writer.close()


async def fetch(target: Target, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """A whole answer: (status, body)."""
    status, pieces = 0, []
    async for code, _, data in request(target, method, path, body):
        status = code
        pieces.append(data)
    return status, b"".join(pieces)


async def server_sent_events(target: Target, path: str, body: bytes) -> AsyncIterator[tuple[float, bytes]]:
    """Yields (arrival, payload) of each `data:` event of a streamed answer.

    Raises LoadError with the body of an answer whose status is not 200.
    """
    pending = b""
    async for status, arrived, data in request(target, "POST", path, body):
        if status != 200:
            raise LoadError(f"status {status}: {data[:300].decode(errors='replace')}")
        pending += data
        *events, pending = pending.split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    yield arrived, line[5:].strip()
