"""Plan: a step while the scheduler puts it together: what is left of it and what is in it."""

from dataclasses import dataclass, field

from headrace.core.batch_builder import ScheduledSequence
from headrace.core.kv_cache import BlockCopy
from headrace.core.sequence import Sequence


@dataclass(slots=True)
class Plan:
    tokens: int  # of the budget, left
    rows: int  # output rows left
    sequences: list[Sequence] = field(default_factory=list)  # parallel to `scheduled`
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

    def take(self, sequence: Sequence, scheduled: ScheduledSequence, copies: list[BlockCopy]) -> None:
        self.tokens -= scheduled.num_scheduled_tokens
        self.rows -= scheduled.num_rows
        self.sequences.append(sequence)
        self.scheduled.append(scheduled)
        self.copies.extend(copies)
