"""FakeBackend: a whole backend without a model. It ships: `--backend fake` serves it, and tests run on it.

The next token comes from an oracle that sees a hash of the prefix. The hash is not handed to it by the scheduler: it is
read back from a `ShadowStore` through block tables and slots, so a wrong table, a missing copy or a block freed too
early raises or changes the tokens. The oracle's candidates become logits and go through the real sampling semantics
(`sampling`), so masks, logprobs, biases, penalties and seeds are honoured.

Time comes from a cost formula and is spent by `pace` (a fake clock's `advance_ns` in simulation). Steps run at
`collect`, so masks may come any time before. `Faults` makes it fail on purpose.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.backend.base import BackendSpec
from headrace.backend.sampling import SampledRows, sample_batch
from headrace.backend.shadow import ShadowError, ShadowStore, next_hash, root_hash
from headrace.base.clock import Clock, SystemClock
from headrace.base.errors import HeadraceError
from headrace.core.batch import F32, I32, Batch, StepResult, check_batch

MAX_IN_FLIGHT = 2


class FakeBackendError(HeadraceError):
    """An injected failure, or a call against the protocol."""


class Prefix(NamedTuple):
    """What an oracle sees: the prefix that ends with `token_id` at `position`."""

    hash: int
    position: int
    token_id: int


Oracle = Callable[[Prefix], Sequence[int]]  # candidates for the next token, most likely first


def hash_oracle(token_ids: Sequence[int], num_candidates: int = 8) -> Oracle:
    """Candidates drawn from `token_ids` by the hash of the prefix: another prefix gives another continuation."""

    def candidates(prefix: Prefix) -> list[int]:
        drawn = prefix.hash
        out = []
        for _ in range(num_candidates):
            out.append(token_ids[drawn % len(token_ids)])
            drawn = next_hash(drawn, 0)
        return out

    return candidates


def script_oracle(token_ids: Sequence[int]) -> Oracle:
    """Says `token_ids` in a circle, by position: readable output for HTTP tests."""
    return lambda prefix: [token_ids[(prefix.position + 1) % len(token_ids)]]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Nanoseconds of a step: base + per_token * tokens + per_context * (KV read)."""

    base_ns: int = 100_000
    per_token_ns: int = 20_000
    per_context_ns: int = 10

    def of(self, batch: Batch) -> int:
        context = int(batch.seq_lens.sum())
        return self.base_ns + self.per_token_ns * batch.num_tokens + self.per_context_ns * context


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, and when. Step ids count from 0."""

    raise_at_steps: frozenset[int] = frozenset()  # collect raises FakeBackendError
    slow_every: int = 0  # every n-th step takes `slow_factor` times as long; 0: none
    slow_factor: int = 100
    non_finite_token: int = -1  # a sequence that computes this token turns non-finite from there on


@dataclass(slots=True)
class _State:
    """One sequence of a step: its prefix before the step, then its new prefixes."""

    start: int
    before: int
    tainted: bool
    hashes: list[int] = field(default_factory=list)


class FakeBackend:
    """`spec.kv_groups` need a full group or windows of at least 2 tokens, for a prefix to be visible at all."""

    def __init__(
        self,
        spec: BackendSpec,
        oracle: Oracle | None = None,
        clock: Clock | None = None,
        pace: Callable[[int], None] | None = None,
        faults: Faults | None = None,
        cost: StepCost | None = None,
    ) -> None:
        self._spec = spec
        self._oracle = oracle or hash_oracle(range(spec.vocab_size))
        self._clock = clock or SystemClock()
        self._pace = pace or (lambda _ns: None)
        self._faults = faults or Faults()
        self._cost = cost or StepCost()
        self._submitted: deque[Batch] = deque()
        self._masks: dict[int, npt.NDArray[np.int32]] = {}
        self._previous_rows = np.empty(0, np.int32)  # tokens by output row of the step before
        self._closed = False
        self.stores = [
            ShadowStore(count, spec.block_size, group.window)
            for group, count in zip(spec.kv_groups, spec.num_blocks, strict=True)
        ]

    @property
    def spec(self) -> BackendSpec:
        return self._spec

    def submit(self, batch: Batch) -> None:
        if self._closed:
            raise FakeBackendError("the backend is closed")
        if len(self._submitted) == MAX_IN_FLIGHT:
            raise FakeBackendError(f"{MAX_IN_FLIGHT} steps are in flight: collect comes before the next submit")
        spec = self._spec
        over = batch.num_tokens > spec.max_tokens or batch.num_rows > spec.max_rows or batch.num_seqs > spec.max_seqs
        if over or int(batch.seq_lens.max(initial=0)) > spec.max_model_len:
            raise FakeBackendError(f"step {batch.step_id} is larger than the backend's spec")
        self._submitted.append(batch)

    def set_masks(self, step_id: int, bits: npt.NDArray[np.int32]) -> None:
        self._masks[step_id] = bits

    def collect(self) -> StepResult:
        if not self._submitted:
            raise FakeBackendError("no step is in flight")
        batch = self._submitted.popleft()
        masks = self._masks.pop(batch.step_id, None)
        if masks is not None:
            batch = dataclasses.replace(batch, mask_bits=masks)
        started_ns = self._clock.now_ns()
        slow = self._faults.slow_every and (batch.step_id + 1) % self._faults.slow_every == 0
        self._pace(self._cost.of(batch) * (self._faults.slow_factor if slow else 1))
        if batch.step_id in self._faults.raise_at_steps:
            raise FakeBackendError(f"injected failure in step {batch.step_id}")
        batch = self._with_token_sources(batch)
        check_batch(batch, self._spec.num_blocks, self._spec.block_size, self._spec.vocab_size)
        states = self._run(batch)
        sampled = sample_batch(self._logits(batch, states), batch)
        self._previous_rows = sampled.token_ids
        return _result(batch, sampled, started_ns, self._clock.now_ns())

    def read_blocks(self, group: int, ids: npt.NDArray[np.int32]) -> bytes:
        return self.stores[group].dump(ids)

    def write_blocks(self, group: int, ids: npt.NDArray[np.int32], data: bytes) -> None:
        self.stores[group].load(ids, data)

    def close(self) -> None:
        self._closed = True
        self._submitted.clear()

    def _with_token_sources(self, batch: Batch) -> Batch:
        """Fills ids that the step before has chosen."""
        pending = np.flatnonzero(batch.token_source >= 0)
        if not len(pending):
            return batch
        input_ids = batch.input_ids.copy()
        input_ids[pending] = self._previous_rows[batch.token_source[pending]]
        return dataclasses.replace(batch, input_ids=input_ids)

    def _run(self, batch: Batch) -> list[_State]:
        """Copies, then reads every visible prefix, then writes the new tokens. Raises ShadowError."""
        for group, source, destination in batch.block_copies.tolist():
            self.stores[group].copy(source, destination)
        states = [self._read(batch, s) for s in range(batch.num_seqs)]
        for g, store in enumerate(self.stores):
            read = [
                store.visible_slots(batch.block_tables[g][s], state.start)
                for s, state in enumerate(states)
                if state.start
            ]
            store.check_disjoint(np.concatenate([np.empty(0, np.int32), *read]), batch.slot_mapping[g])
        for s, state in enumerate(states):
            self._write(batch, s, state)
        return states

    def _read(self, batch: Batch, s: int) -> _State:
        start = int(batch.seq_lens[s]) - int(batch.cu_seqlens_q[s + 1] - batch.cu_seqlens_q[s])
        root = root_hash(int(batch.adapter_ids[s]))
        if start == 0:
            return _State(0, root, False)
        found: set[int] = set()
        tainted = False
        for g, store in enumerate(self.stores):
            slots = store.visible_slots(batch.block_tables[g][s], start)
            if len(slots):
                prefix_hash, is_tainted = store.read(slots, start, root)
                found.add(prefix_hash)
                tainted |= is_tainted
        if len(found) != 1:
            raise ShadowError(f"the KV groups of sequence {s} hold {len(found)} different prefixes")
        return _State(start, found.pop(), tainted)

    def _write(self, batch: Batch, s: int, state: _State) -> None:
        tokens = slice(int(batch.cu_seqlens_q[s]), int(batch.cu_seqlens_q[s + 1]))
        prefix_hash = state.before
        for token in batch.input_ids[tokens].tolist():
            prefix_hash = next_hash(prefix_hash, token)
            state.hashes.append(prefix_hash)
            state.tainted |= token == self._faults.non_finite_token
        for g, store in enumerate(self.stores):
            store.write(batch.slot_mapping[g][tokens], state.start, state.hashes, state.before, state.tainted)

    def _logits(self, batch: Batch, states: list[_State]) -> F32:
        """[R, V]: the oracle's candidates stand out from a flat floor; NaN where the sequence is tainted."""
        logits = np.full((batch.num_rows, self._spec.vocab_size), -12.0, np.float32)
        owners = np.searchsorted(batch.cu_seqlens_q, batch.output_rows, side="right") - 1
        for row, (index, s) in enumerate(zip(batch.output_rows.tolist(), owners.tolist(), strict=True)):
            state, offset = states[s], index - int(batch.cu_seqlens_q[s])
            if state.tainted:
                logits[row] = np.nan
                continue
            prefix = Prefix(state.hashes[offset], state.start + offset, int(batch.input_ids[index]))
            candidates = self._oracle(prefix)
            for rank in range(len(candidates) - 1, -1, -1):
                logits[row, candidates[rank]] = 8.0 - 0.75 * rank
        return logits


def _result(batch: Batch, sampled: SampledRows, started_ns: int, ended_ns: int) -> StepResult:
    """Gathers rows into sequences."""
    chosen = sampled.token_ids >= 0
    owners = np.searchsorted(batch.cu_seqlens_q, batch.output_rows, side="right") - 1
    counts = np.bincount(owners[chosen], minlength=batch.num_seqs)
    cu_tokens = np.zeros(batch.num_seqs + 1, np.int32)
    np.cumsum(counts, out=cu_tokens[1:])
    status = np.zeros(batch.num_seqs, np.uint8)
    np.bitwise_or.at(status, owners, sampled.status)
    accepted: I32 = counts.astype(np.int32)
    return StepResult(
        step_id=batch.step_id,
        token_ids=sampled.token_ids[chosen],
        cu_tokens=cu_tokens,
        num_accepted=np.maximum(accepted - 1, 0),
        logprobs=sampled.logprobs,
        top_ids=sampled.top_ids,
        signals=sampled.signals,
        status=status,
        hidden=np.empty((0, 0), np.float32),
        started_ns=started_ns,
        ended_ns=ended_ns,
        phase_ns=np.empty(0, np.int64),
    )
