"""Server-sent events: headers at once, then frames, with a comment whenever the line has been silent for a while.

A stream that ends well ends with `data: [DONE]`. One that fails ends with `data: {"error": ...}` and nothing after it:
a client must never take half an answer for a whole one. When the client goes away, or stops reading for a minute, the
events are closed, which aborts the generation.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.types import Receive, Scope, Send

from headrace.base.errors import RequestError
from headrace.server.answers import cancel, disconnected
from headrace.server.errors import ClientDisconnectedError, ErrorResponse, error_of

log = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_MAX_SEND_S = 60.0  # a client that takes longer to read one frame has stopped reading
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),
]


def frame(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class EventStream:
    """An ASGI response made of encoded frames."""

    def __init__(self, frames: AsyncGenerator[bytes, None], keep_alive_interval: float) -> None:
        """`keep_alive_interval` is in seconds of silence."""
        self._frames = frames
        self._loop = asyncio.get_running_loop()
        self._interval = keep_alive_interval
        self._last_sent = 0.0  # on the loop's clock
        self._sending_since: float | None = None  # a frame that the client has not taken yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._frames):
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            self._last_sent = self._loop.time()
            pump = asyncio.ensure_future(self._pump(scope, send))
            gone = asyncio.ensure_future(disconnected(receive))
            idle = asyncio.ensure_future(self._watch(send))
            try:
                await asyncio.wait({pump, gone, idle}, return_when=asyncio.FIRST_COMPLETED)
                if pump.done():
                    pump.result()
            finally:
                await cancel(pump, gone, idle)

    async def _pump(self, scope: Scope, send: Send) -> None:
        try:
            async for data in self._frames:
                await self._write(send, data)
            await self._write(send, DONE)
        except ClientDisconnectedError:
            raise
        except Exception as error:
            if not isinstance(error, RequestError):
                log.exception("stream %s failed", scope.get("state", {}).get("request_id", ""))
            await self._write(send, frame(ErrorResponse(error_of(error))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, data: bytes) -> None:
        # A timeout of its own for each frame would cost more than the frame: `_watch` has one for all.
        self._sending_since = self._last_sent = self._loop.time()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending_since = None

    async def _watch(self, send: Send) -> None:
        """Breaks silence with comments. Returns when the client has stopped reading."""
        while True:
            now = self._loop.time()
            if self._sending_since is not None:
                left = self._sending_since + _MAX_SEND_S - now
                if left <= 0:
                    return
            else:
                left = self._last_sent + self._interval - now
                if left <= 0:
                    async with asyncio.timeout(_MAX_SEND_S):
                        await self._write(send, KEEP_ALIVE)
                    left = self._interval
            await asyncio.sleep(min(left, _MAX_SEND_S))
