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
        self._interval = keep_alive_interval
        self._last_sent = 0.0  # on the loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._frames):
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            self._last_sent = asyncio.get_running_loop().time()
            pump = asyncio.ensure_future(self._pump(scope, send))
            gone = asyncio.ensure_future(disconnected(receive))
            idle = asyncio.ensure_future(self._keep_alive(send))
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
        """Raises ClientDisconnectedError when the client has stopped reading."""
        try:
            async with asyncio.timeout(_MAX_SEND_S):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError as error:
            raise ClientDisconnectedError from error
        self._last_sent = asyncio.get_running_loop().time()

    async def _keep_alive(self, send: Send) -> None:
        """Runs until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            silent = loop.time() - self._last_sent
            if silent >= self._interval:
                await self._write(send, KEEP_ALIVE)
            else:
                await asyncio.sleep(self._interval - silent)
