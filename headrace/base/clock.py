"""Time behind one seam, so that simulation can own it."""

import time
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        ...


class SystemClock:
    def now_ns(self) -> int:
        return time.monotonic_ns()


class FakeClock:
    """A clock that moves only when told."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance_ns(self, delta_ns: int) -> None:
        if delta_ns < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-delta_ns} ns")
        self._now_ns += delta_ns
