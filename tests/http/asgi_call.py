"""One ASGI call, driven by hand: what the server sends is awaited message by message, and the client can go away."""

import asyncio
import json
from types import TracebackType
from typing import Any

from starlette.types import ASGIApp, Message


class Call:
    """`async with Call(app, ...) as call:` starts it; leaving disconnects and waits for the end."""

    def __init__(self, app: ASGIApp, path: str, body: Any, method: str = "POST", headers: dict[str, str] | None = None):
        raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        self._app = app
        self._scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": raw,
            "http_version": "1.1",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._outbox: asyncio.Queue[Message | None] = asyncio.Queue()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._inbox.put_nowait({"type": "http.request", "body": data, "more_body": False})
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Call":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None):
        self.disconnect()
        await self.ended()

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._inbox.get, self._outbox.put)
        finally:
            self._outbox.put_nowait(None)

    def disconnect(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def ended(self) -> None:
        """Waits for the application to return. Raises what it raised."""
        if self._task is not None:
            await self._task

    async def next(self) -> Message | None:
        """The next message from the application; None when it has returned."""
        return await self._outbox.get()

    async def start(self) -> tuple[int, dict[str, str]]:
        message = await self.next()
        assert message is not None and message["type"] == "http.response.start", message
        return message["status"], {name.decode(): value.decode() for name, value in message["headers"]}

    async def frame(self) -> str:
        """The next non-empty piece of the body; "" at its end."""
        while (message := await self.next()) is not None:
            if message.get("body"):
                return message["body"].decode()
        return ""

    async def rest(self) -> list[str]:
        frames = []
        while frame := await self.frame():
            frames.append(frame)
        return frames


def payload(frame: str) -> Any:
    """The JSON of one `data:` frame."""
    assert frame.startswith("data: ") and frame.endswith("\n\n"), frame
    return json.loads(frame[6:])
