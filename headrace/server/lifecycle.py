"""Lifecycle: how many requests are being answered, and whether new ones are still welcome."""

import asyncio


class Lifecycle:
    """One per server. Only the event loop's thread may call it."""

    def __init__(self) -> None:
        self.draining = False
        self._live = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def live(self) -> int:
        """Requests that have come and whose response has not ended."""
        return self._live

    def enter(self) -> None:
        self._live += 1
        self._idle.clear()

    def leave(self) -> None:
        self._live -= 1
        if not self._live:
            self._idle.set()

    def drain(self) -> None:
        """From now on the server is not ready and takes no new generation; what runs goes on."""
        self.draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is live. False when the time ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
