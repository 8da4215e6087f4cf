"""What surrounds every request: its id, its timing headers, a line in the log, and the bounds on its body."""

import asyncio
import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.base.clock import Clock
from headrace.server.errors import BodyTimeoutError, BodyTooLargeError, ClientDisconnectedError
from headrace.server.lifecycle import Lifecycle

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PROBES = frozenset({"/livez", "/readyz", "/health", "/metrics"})


class RequestContext:
    """ASGI middleware, outermost: gives the request an id, counts it as live, and sets the headers of every response.

    A client's own `x-request-id` is kept when it is short and plain, else replaced. It never becomes the engine's
    request id: two clients may send the same one.
    """

    def __init__(self, app: ASGIApp, clock: Clock, lifecycle: Lifecycle) -> None:
        self.app = app
        self._clock = clock
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started_ns = self._clock.now_ns()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def decorate(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["openai-processing-ms"] = str((self._clock.now_ns() - started_ns) // 1_000_000)
                headers["cache-control"] = "no-store"
                if self._lifecycle.draining:
                    headers["connection"] = "close"
            await send(message)

        self._lifecycle.enter()
        try:
            await self.app(scope, receive, decorate)
        finally:
            self._lifecycle.leave()
            level = logging.DEBUG if scope["path"] in _PROBES else logging.INFO
            duration_ms = (self._clock.now_ns() - started_ns) / 1e6
            log.log(level, "%s %r %d %.1f ms %s", scope["method"], scope["path"][:200], status, duration_ms, request_id)


class BodyLimit:
    """ASGI middleware: a body larger than `max_bytes` is refused before it is read, or as soon as it has grown so."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._max_bytes:
            raise self._too_large()
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._max_bytes:
                    raise self._too_large()
            return message

        await self.app(scope, counted, send)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"The body is larger than {self._max_bytes} bytes", code="body_too_large")


async def read_body(request: Request, timeout_s: float) -> bytes:
    """The whole body. Raises BodyTimeoutError, ClientDisconnectedError, and BodyTooLargeError from the limit above."""
    try:
        async with asyncio.timeout(timeout_s):
            return await request.body()
    except TimeoutError as error:
        raise BodyTimeoutError(f"The body did not arrive within {timeout_s:g} seconds", code="body_timeout") from error
    except ClientDisconnect as error:
        raise ClientDisconnectedError from error
