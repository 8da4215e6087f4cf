"""What happens to requests, as plain values. Metrics, traces, cost and quality are folds over this stream.

Every event carries (source, epoch, sequence, monotonic ns). The epoch changes when the engine restarts; within one
(source, epoch) the sequence has no gaps, so a fold can tell that nothing was lost.
"""

from enum import StrEnum

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
