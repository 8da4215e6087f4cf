"""What happens to requests, as plain values. Metrics, traces, cost and quality are folds over this stream.

Every event carries (source, epoch, sequence, monotonic ns). The epoch changes when the engine restarts; within one
(source, epoch) the sequence has no gaps, so a fold can tell that nothing was lost.
"""

from enum import StrEnum
from typing import TypedDict, Unpack

import msgspec


class EventKind(StrEnum):
    ACCEPTED = "accepted"  # num_tokens: prompt tokens
    REFUSED = "refused"  # detail: why
    QUEUED = "queued"
    SCHEDULED = "scheduled"  # num_tokens: scheduled in this step
    PREFIX_HIT = "prefix_hit"  # num_tokens: taken from the prefix cache; of: tokens looked up
    FIRST_TOKEN = "first_token"
    TOKENS = "tokens"  # num_tokens: output tokens of this step
    PREEMPTED = "preempted"
    RESUMED = "resumed"
    FINISHED = "finished"  # detail: finish reason; num_tokens: output tokens; of: prompt tokens
    ENGINE_READY = "engine_ready"
    ENGINE_DIED = "engine_died"
    STEP = "step"  # num_tokens: tokens in the step; of: sequences


class Event(msgspec.Struct, frozen=True, array_like=True):
    kind: EventKind
    source: str  # "engine" or "api"
    epoch: int
    sequence: int
    time_ns: int
    request_id: str = ""
    choice: int = 0
    num_tokens: int = 0
    of: int = 0
    detail: str = ""


class EventDetails(TypedDict, total=False):
    num_tokens: int
    of: int
    detail: str


class EventRecorder:
    """Numbers the events of one (source, epoch) and keeps them until `drain`. It has no clock: time is passed in."""

    def __init__(self, source: str, epoch: int) -> None:
        self.source = source
        self.epoch = epoch
        self._next_sequence = 0
        self._events: list[Event] = []

    def record(
        self, kind: EventKind, time_ns: int, request_id: str = "", choice: int = 0, **details: Unpack[EventDetails]
    ) -> None:
        event = Event(kind, self.source, self.epoch, self._next_sequence, time_ns, request_id, choice, **details)
        self._next_sequence += 1
        self._events.append(event)

    def record_tokens(self, kind: EventKind, time_ns: int, request_id: str, choice: int, num_tokens: int) -> None:
        """`record` with `num_tokens` alone, for what happens to every sequence in every step."""
        self._events.append(
            Event(kind, self.source, self.epoch, self._next_sequence, time_ns, request_id, choice, num_tokens)
        )
        self._next_sequence += 1

    def drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def take_back(self, events: list[Event]) -> None:
        """Unsays what was drained last, so that the numbers go on without a gap: for work that is nobody's traffic."""
        if events:
            self._next_sequence = events[0].sequence
