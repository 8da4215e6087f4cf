"""uvicorn's HTTP/1.1 protocol with bounds that it lacks: the size of a request's head and the time it may take.

Without them one connection could fill the memory with a header that never ends, and a thousand could hold every file
descriptor by saying nothing.
"""

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.server.errors import Error, ErrorResponse

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 256
HEAD_TIMEOUT_S = 30.0


def _refusal(status: str, message: str, code: str) -> bytes:
    """A whole response, for what is refused before it is a request."""
    body = msgspec.json.encode(ErrorResponse(Error(message, "invalid_request_error", code=code)))
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


_TOO_LARGE = _refusal(
    "431 Request Header Fields Too Large", "The request head is larger than the server reads", "head_too_large"
)
_NOT_HTTP = _refusal("400 Bad Request", "This is not a valid HTTP/1.1 request", "invalid_http")


class _HeadTooLargeError(Exception):
    pass


class BoundedHttp(HttpToolsProtocol):
    """The head of a request: everything up to the blank line, and the silence before it on a fresh connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0  # of reads that lay wholly inside a head
        self._head_began = False  # in the read at hand, behind the end of another request
        self._num_headers = 0
        self._header_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._head_timer is None:
            self._start_timer()
        self._head_began = False
        super().data_received(data)
        # A read that ended a request was mostly its body, and however large it was, no more than one read of head.
        if self._in_head and not self._head_began and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_TOO_LARGE)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._header_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS or self._header_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLargeError  # the parser reports it to `data_received`, which answers below
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        if self._num_headers > MAX_HEADERS or self._header_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)
        else:
            self._refuse(_NOT_HTTP)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_head = False
        self._head_bytes = self._num_headers = self._header_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = self._head_began = True
        super().on_message_complete()

    def _refuse(self, response: bytes) -> None:
        self.transport.write(response)
        self.transport.close()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
