"""The exact account of live requests on the client's side: who waits, who runs, what each user has still to read.

A request is entered when it is admitted and leaves when its last choice ends, its user goes away or it fails. A choice
waits until the engine says that it scheduled it. The client holds a request's whole state, so that one which has
produced nothing can be given to a fresh engine. Knows no processes and no sockets.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress

from headrace.base.errors import RequestError
from headrace.core.admission import Admission
from headrace.engine.choice import ChoiceStream
from headrace.engine.generation import Delta, GenerationRequest
from headrace.text.tokenizer import Tokenizer


class LiveRequest:
    """One admitted request: its unfinished choices, and what its user has not read yet."""

    def __init__(self, request: GenerationRequest, arrival_ns: int, tokenizer: Tokenizer) -> None:
        self.request = request
        self.arrival_ns = arrival_ns
        self.attempts = 0
        self.has_output = False
        self.streams: dict[int, ChoiceStream] = {}  # unfinished choices
        self.waiting: set[int] = set()  # of those, the ones that the engine has not scheduled yet
        self.error: RequestError | None = None
        self._tokenizer = tokenizer
        self._unread: deque[Delta] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.restart()

    def restart(self) -> None:
        """Everything is still to come. Only for a request that has produced nothing."""
        self.streams = {choice: ChoiceStream(self.request, choice, self._tokenizer) for choice in range(self.request.n)}
        self.waiting = set(self.streams)

    def put(self, delta: Delta) -> None:
        self._unread.append(delta)
        self._wake()

    def end(self, error: RequestError | None = None) -> None:
        """No more comes: all choices have finished, or `error` is raised once what came before is read."""
        self.error = error
        self.streams.clear()
        self.waiting.clear()
        self._wake()

    async def read(self) -> Delta | None:
        """The next delta; None at the end. Raises the error that ended the request."""
        while not self._unread:
            if self.error is not None:
                raise self.error
            if not self.streams:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._unread.popleft()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Ledger:
    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._live: dict[str, LiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_seats = 0  # choices that may run at once, which the engine says
        self.num_waiting = 0  # choices that wait
        self.num_open = 0  # choices that wait or run

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Oldest first; the ledger may change meanwhile."""
        return iter(list(self._live.values()))

    def get(self, request_id: str) -> LiveRequest | None:
        return self._live.get(request_id)

    def retry_after_s(self, num_new: int, now_ns: int) -> float | None:
        """None when `num_new` more choices may join; else the seconds after which to come back.

        Choices that find a free seat will not wait: only those beyond the seats count against the bound.
        """
        num_running = self.num_open - self.num_waiting
        free_seats = max(0, self.num_seats - num_running)
        decision = self._admission.decide(self.num_waiting - free_seats, num_new, now_ns)
        return None if decision.admitted else decision.retry_after_s

    def enter(self, live: LiveRequest) -> None:
        if live.request.request_id in self._live:
            raise RequestError(f"request id {live.request.request_id!r} is in use", param="request_id")
        self._live[live.request.request_id] = live
        self.num_waiting += len(live.waiting)
        self.num_open += len(live.streams)
        self._idle.clear()

    def scheduled(self, request_id: str, choice: int, now_ns: int) -> None:
        """The engine has begun to compute this choice."""
        live = self._live.get(request_id)
        if live is not None and choice in live.waiting:
            live.waiting.remove(choice)
            self._left_queue(1, now_ns)

    def restarted(self, live: LiveRequest) -> None:
        """Puts every choice of a request back to waiting: its engine is gone and it had produced nothing."""
        num_scheduled = len(live.streams) - len(live.waiting)
        live.restart()
        self.num_waiting += num_scheduled

    def finished(self, live: LiveRequest, choice: int, now_ns: int) -> None:
        """One choice has ended. The last one takes the request out."""
        del live.streams[choice]
        self.num_open -= 1
        if choice in live.waiting:
            live.waiting.remove(choice)
            self._left_queue(1, now_ns)
        if not live.streams:
            self.leave(live, None, now_ns)

    def leave(self, live: LiveRequest, error: RequestError | None, now_ns: int) -> None:
        """Takes a request out, whatever it is doing. Its reader gets `error`, if any, after what is unread."""
        if self._live.pop(live.request.request_id, None) is None:
            return
        self.num_open -= len(live.streams)
        self._left_queue(len(live.waiting), now_ns)
        live.end(error)
        if not self._live:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def _left_queue(self, count: int, now_ns: int) -> None:
        self.num_waiting -= count
        if count:
            self._admission.departed(count, self.num_waiting, now_ns)


class Generation(AsyncIterator[Delta]):
    """What `AsyncEngine.generate` gives: the deltas of one request as they come.

    Abandoning it aborts the request wherever it is: `aclose`, cancelling the reader, or dropping the last reference.
    """

    def __init__(
        self, live: LiveRequest, abandon: Callable[[LiveRequest], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._live = live
        self._abandon = abandon
        self._loop = loop
        self._closed = False

    async def __anext__(self) -> Delta:
        if self._closed:
            raise StopAsyncIteration
        try:
            delta = await self._live.read()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def aclose(self) -> None:
        self._closed = True
        self._abandon(self._live)

    def __del__(self) -> None:
        if self._live.streams and not self._loop.is_closed():
            with suppress(RuntimeError):  # the loop closed in between: its engine is gone with it
                self._loop.call_soon_threadsafe(self._abandon, self._live)
