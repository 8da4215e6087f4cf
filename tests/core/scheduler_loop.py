"""The loop around a Scheduler, on a stand-in for the backend that answers each row with 100 + its position."""

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.core.batch import Batch, OutputFlag, RowStatus, StepResult
from headrace.core.events import Event, EventKind, EventRecorder
from headrace.core.kv_cache import KVCacheManager
from headrace.core.kv_group import KVGroup
from headrace.core.outputs import ChoiceOutput, StepOutputs
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.scheduler import Scheduler, StepLimits

BLOCK = 4


class Engine:
    """The loop around a scheduler. `now` counts steps; `outputs` and `events` collect everything."""

    def __init__(
        self, num_blocks: int = 64, seats: int = 8, budget: int = 64, rows: int = 64, context: int = 200, **kv: bool
    ) -> None:
        self.kv = KVCacheManager((KVGroup("full", (0,), 1, 8),), (num_blocks,), BLOCK, **kv)
        limits = StepLimits(seats, budget, rows, context, vocab_size=1000)
        self.scheduler = Scheduler(limits, self.kv, EventRecorder("engine", 0))
        self.now = 0
        self.outputs: list[ChoiceOutput] = []
        self.events: list[Event] = []
        self.poisoned: set[int] = set()  # prompts that begin with this token give numbers that are not finite

    def add(self, name: str, prompt: int | list[int] = 6, n: int = 1, arrival: int = 0, **params: Any) -> list[Request]:
        tokens = [hash_token(name, i) for i in range(prompt)] if isinstance(prompt, int) else prompt
        settings = SamplingParams(**params)
        choices = [Request(name, tokens, settings, arrival, choice) for choice in range(n)]
        self.scheduler.add(choices, self.now)
        return choices

    def step(self, in_flight: Callable[[], object] = lambda: None) -> Batch | None:
        batch = self.scheduler.schedule(self.now)
        if batch is None:
            self.receive(self.scheduler.drain())
            return None
        in_flight()
        self.receive(self.scheduler.update(batch, self.answer(batch), self.now))
        self.scheduler.check_integrity()
        self.now += 1
        return batch

    def run(self, most: int = 500) -> "Engine":
        for _ in range(most):
            if self.step() is None:
                assert not self.scheduler.has_requests
                assert self.scheduler.gauges().kv_blocks_used == 0
                return self
        raise AssertionError(f"no end after {most} steps")

    def receive(self, outputs: StepOutputs) -> None:
        self.outputs.extend(outputs.outputs)
        self.events.extend(outputs.events)

    def answer(self, batch: Batch) -> StepResult:
        owners = np.searchsorted(batch.cu_seqlens_q, batch.output_rows, side="right") - 1
        samples = (batch.output_flags & OutputFlag.SAMPLE) != 0
        cu_tokens = np.zeros(batch.num_seqs + 1, np.int32)
        np.cumsum(np.bincount(owners[samples], minlength=batch.num_seqs), out=cu_tokens[1:])
        status = np.zeros(batch.num_seqs, np.uint8)
        first = batch.input_ids[batch.cu_seqlens_q[:-1]].tolist()
        for s, token in enumerate(first):
            if token in self.poisoned:
                status[s] = RowStatus.NON_FINITE
        k = max(0, int(batch.sampling.num_logprobs.max(initial=0)))
        return StepResult(
            step_id=batch.step_id,
            token_ids=(100 + batch.sampling.position[samples]).astype(np.int32),
            cu_tokens=cu_tokens,
            num_accepted=np.zeros(batch.num_seqs, np.int32),
            logprobs=np.tile(-np.arange(k + 1, dtype=np.float32), (batch.num_rows, 1)),
            top_ids=np.tile(np.arange(k, dtype=np.int32), (batch.num_rows, 1)),
            signals=np.zeros((batch.num_rows, 4), np.float32),
            status=status,
            hidden=np.empty((0, 0), np.float32),
            started_ns=0,
            ended_ns=0,
            phase_ns=np.empty(0, np.int64),
        )

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        mine = [o for o in self.outputs if (o.request_id, o.choice) == (name, choice)]
        return [token for output in mine for token in output.token_ids]

    def reason(self, name: str, choice: int = 0) -> FinishReason | None:
        mine = [o for o in self.outputs if (o.request_id, o.choice) == (name, choice)]
        return mine[-1].finish_reason if mine else None

    def of(self, kind: EventKind) -> list[Event]:
        return [event for event in self.events if event.kind is kind]


def hash_token(name: str, index: int) -> int:
    return sum(map(ord, name)) * 7 % 500 + index
