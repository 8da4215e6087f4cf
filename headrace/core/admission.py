"""Admission: whether one more request may join the queue, and if not, when to come back.

The queue is bounded: an honest refusal now beats a timeout later. `retry_after_s` is the time in which as many requests
leave the queue as must leave first, at the rate measured over the last departures while others were still waiting (a
queue that runs empty says nothing about speed). It knows no requests: its owner counts and reports.
"""

from collections import deque
from dataclasses import dataclass

_SECOND = 1_000_000_000
MEASURED_DEPARTURES = 64
UNMEASURED_RETRY_S = 2.0
RETRY_BOUNDS_S = (1.0, 600.0)


@dataclass(frozen=True, slots=True)
class Decision:
    admitted: bool
    retry_after_s: float = 0.0


class Admission:
    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._departures: deque[int] = deque(maxlen=MEASURED_DEPARTURES)

    def decide(self, num_waiting: int, num_new: int, now_ns: int) -> Decision:
        """For `num_new` sequences beside `num_waiting` ones that have not started. All of them or none."""
        excess = num_waiting + num_new - self.max_waiting
        if excess <= 0:
            return Decision(True)
        rate = self.departures_per_s(now_ns)
        if rate is None:
            return Decision(False, UNMEASURED_RETRY_S)
        low, high = RETRY_BOUNDS_S
        return Decision(False, min(high, max(low, excess / rate)))

    def departed(self, count: int, num_waiting: int, now_ns: int) -> None:
        """`count` sequences left the queue (started, or gave up) and `num_waiting` are left behind."""
        if num_waiting == 0:
            self._departures.clear()
            return
        self._departures.extend([now_ns] * min(count, MEASURED_DEPARTURES))

    def departures_per_s(self, now_ns: int) -> float | None:
        """Departures since the first one remembered; falls while nothing leaves. None before anything is measured."""
        if len(self._departures) < 2 or now_ns <= self._departures[0]:
            return None
        return (len(self._departures) - 1) * _SECOND / (now_ns - self._departures[0])
