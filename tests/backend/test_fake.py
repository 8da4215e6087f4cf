"""FakeBackend: the oracle, the shadow store's checks, sampling parameters, faults, and the protocol."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from headrace.backend.base import BackendSpec
from headrace.backend.fake import (
    FakeBackend,
    FakeBackendError,
    Faults,
    StepCost,
    hash_oracle,
    script_oracle,
)
from headrace.backend.shadow import ShadowError, ShadowStore, next_hash, root_hash
from headrace.base.clock import FakeClock
from headrace.core.batch import Batch, RowStatus
from headrace.core.batch_builder import ScheduledSequence, build_batch
from headrace.core.kv_group import KVGroup
from headrace.core.request import Request, SamplingParams

VOCAB = 50
SPEC = BackendSpec(
    kv_groups=(KVGroup("full", (0,), 1, 8), KVGroup("window", (1,), 1, 8, 5)),
    num_blocks=(16, 16),
    block_size=4,
    vocab_size=VOCAB,
    max_tokens=32,
    max_rows=8,
    max_seqs=4,
    max_model_len=64,
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class One:
    """One sequence in blocks [base, base + 4) of both groups, driven by hand."""

    def __init__(self, prompt: list[int], params: SamplingParams = GREEDY, base: int = 0) -> None:
        self.request = Request("r", prompt, params, 0)
        self.table = np.arange(base, base + 4, dtype=np.int32)

    def item(self, count: int | None = None) -> ScheduledSequence:
        start = self.request.num_computed_tokens
        return ScheduledSequence(
            self.request, start, self.request.num_tokens - start if count is None else count, (self.table, self.table)
        )

    def advance(self, backend: FakeBackend, step_id: int, count: int | None = None) -> int | None:
        item = self.item(count)
        backend.submit(build_batch(step_id, [item], 4, [], VOCAB))
        result = backend.collect()
        self.request.num_computed_tokens = item.end
        for token in result.token_ids.tolist():
            self.request.output_token_ids.append(token)
            return int(token)
        return None


def generate(backend: FakeBackend, one: One, count: int) -> list[int]:
    return [one.advance(backend, step) for step in range(count)]  # type: ignore[misc]


def test_tokens_depend_on_the_whole_prefix_and_not_on_chunks() -> None:
    whole, chunked, other = One([1, 2, 3, 4, 5, 6]), One([1, 2, 3, 4, 5, 6]), One([9, 2, 3, 4, 5, 6])
    expected = generate(FakeBackend(SPEC), whole, 5)
    backend = FakeBackend(SPEC)
    chunked.advance(backend, 0, 1)
    chunked.advance(backend, 1, 3)
    assert generate(backend, chunked, 5) == expected
    assert generate(FakeBackend(SPEC), other, 5) != expected


def test_the_oracle_is_asked_with_the_prefix() -> None:
    seen = []

    def oracle(prefix):  # type: ignore[no-untyped-def]
        seen.append(prefix)
        return [7, 8]

    one = One([3, 4])
    assert generate(FakeBackend(SPEC, oracle), one, 2) == [7, 7]
    expected = root_hash(0)
    for token in (3, 4):
        expected = next_hash(expected, token)
    assert seen[0] == (expected, 1, 4)
    assert seen[1][1:] == (2, 7)


def test_a_script_is_said_in_a_circle() -> None:
    one = One([1, 2])
    assert generate(FakeBackend(SPEC, script_oracle([10, 11, 12])), one, 4) == [12, 10, 11, 12]


def test_hash_oracle_draws_only_from_its_tokens() -> None:
    one = One([1])
    assert set(generate(FakeBackend(SPEC, hash_oracle([20, 21, 22])), one, 8)) <= {20, 21, 22}


def test_sampling_parameters_are_honoured() -> None:
    backend = FakeBackend(SPEC, lambda _prefix: [7, 8])
    assert One([1], GREEDY).advance(backend, 0) == 7
    forbidding = dataclasses.replace(GREEDY, min_tokens=1, stop_token_ids=(7,))
    assert One([1], forbidding).advance(backend, 1) == 8
    biased = dataclasses.replace(GREEDY, logit_bias=((30, 99.0),))
    assert One([1], biased).advance(backend, 2) == 30


def test_masks_may_come_after_submit() -> None:
    backend = FakeBackend(SPEC, lambda _prefix: [7, 8])
    batch = build_batch(0, [One([1]).item()], 4, [], VOCAB)
    backend.submit(dataclasses.replace(batch, mask_row=np.zeros(1, np.int32)))
    backend.set_masks(0, np.array([[1 << 8, 0]], np.int32))
    assert backend.collect().token_ids.tolist() == [8]


def test_a_token_source_takes_the_id_from_the_step_before() -> None:
    """Step 1 is submitted before step 0 is read."""
    backend = FakeBackend(SPEC)
    one, twin = One([1, 2, 3]), One([1, 2, 3])
    expected = generate(FakeBackend(SPEC), twin, 2)
    backend.submit(build_batch(0, [one.item()], 4, [], VOCAB))
    one.request.num_computed_tokens = 3
    one.request.output_token_ids.append(0)
    ahead = build_batch(1, [one.item()], 4, [], VOCAB)
    backend.submit(dataclasses.replace(ahead, token_source=np.zeros(1, np.int32)))
    assert [backend.collect().token_ids.tolist(), backend.collect().token_ids.tolist()] == [
        [expected[0]],
        [expected[1]],
    ]


def test_block_copies_move_the_prefix() -> None:
    backend = FakeBackend(SPEC)
    one = One([1, 2, 3, 4, 5, 6])
    one.advance(backend, 0, 5)
    moved = One([1, 2, 3, 4, 5, 6], base=8)
    moved.request.num_computed_tokens = 5
    copies = [(g, block, 8 + block) for g in (0, 1) for block in (0, 1)]
    backend.submit(build_batch(1, [moved.item()], 4, copies, VOCAB))
    assert backend.collect().token_ids.tolist() == [one.advance(backend, 2)]


def test_blocks_can_be_read_and_written_elsewhere() -> None:
    source, target = FakeBackend(SPEC), FakeBackend(SPEC)
    one = One([1, 2, 3, 4, 5, 6])
    one.advance(source, 0, 5)
    ids = np.array([0, 1], np.int32)
    for group in (0, 1):
        target.write_blocks(group, ids + 4, source.read_blocks(group, ids))
    moved = One([1, 2, 3, 4, 5, 6], base=4)
    moved.request.num_computed_tokens = 5
    assert moved.advance(target, 0) == one.advance(source, 1)
    with pytest.raises(ShadowError, match="bytes"):
        target.write_blocks(0, ids, b"short")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda store: store.position.__setitem__(2, -1), "holds position -1"),
        (lambda store: store.parent.__setitem__(2, 5), "continues another prefix at position 2"),
        (lambda store: store.hash.__setitem__(5, 5), "different prefixes"),
        (lambda store: store.parent.__setitem__(0, 5), "begins another prefix"),
    ],
)
def test_a_read_of_anything_else_raises(damage: Callable[[ShadowStore], None], message: str) -> None:
    backend = FakeBackend(SPEC)
    one = One([1, 2, 3, 4, 5, 6, 7])
    one.advance(backend, 0, 6)
    damage(backend.stores[0])
    with pytest.raises(ShadowError, match=message):
        one.advance(backend, 1)


def test_the_prefix_of_another_adapter_raises() -> None:
    backend = FakeBackend(SPEC)
    one = One([1, 2, 3, 4])
    one.advance(backend, 0, 3)
    one.request.adapter_id = 1
    with pytest.raises(ShadowError, match="begins another prefix"):
        one.advance(backend, 1)


def test_a_slot_that_another_sequence_reads_must_not_be_written() -> None:
    backend = FakeBackend(SPEC)
    one, other = One([1, 2, 3, 4, 5, 6]), One([1, 2])
    one.advance(backend, 0, 5)
    backend.submit(build_batch(1, [one.item(), other.item()], 4, [], VOCAB))
    with pytest.raises(ShadowError, match="in the same step"):
        backend.collect()


def test_a_poisoned_sequence_turns_non_finite_and_so_does_who_reads_its_blocks() -> None:
    backend = FakeBackend(SPEC, faults=Faults(non_finite_token=9))
    good, bad = One([1, 2, 3], base=4), One([1, 9, 3, 4])
    bad.advance(backend, 0, 3)
    backend.submit(build_batch(1, [bad.item(), good.item()], 4, [], VOCAB))
    result = backend.collect()
    assert result.status.tolist() == [RowStatus.NON_FINITE, RowStatus.OK]
    assert result.cu_tokens.tolist() == [0, 0, 1]


def test_injected_failures_and_slowness() -> None:
    clock = FakeClock()
    faults = Faults(raise_at_steps=frozenset({2}), slow_every=2, slow_factor=10)
    backend = FakeBackend(SPEC, None, clock, clock.advance_ns, faults, StepCost(1000, 10, 1))
    one = One([1, 2, 3])
    times = []
    for step in range(2):
        before = clock.now_ns()
        one.advance(backend, step)
        times.append(clock.now_ns() - before)
    assert times == [1000 + 30 + 3, 10 * (1000 + 10 + 4)]
    with pytest.raises(FakeBackendError, match="injected failure in step 2"):
        one.advance(backend, 2)


def test_results_carry_the_time_of_the_step() -> None:
    clock = FakeClock(5)
    backend = FakeBackend(SPEC, None, clock, clock.advance_ns)
    backend.submit(build_batch(0, [One([1]).item()], 4, [], VOCAB))
    result = backend.collect()
    assert (result.started_ns, result.ended_ns) == (5, clock.now_ns())
    assert result.ended_ns > 5


def too_long() -> Batch:
    one = One([1] * 65)
    one.table = np.arange(16, dtype=np.int32).repeat(2)[:17]
    one.request.num_computed_tokens = 64
    return build_batch(0, [one.item()], 4, [], VOCAB)


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(build_batch(0, [One([1] * 5, base=i).item(1) for i in range(5)], 4, [], VOCAB), id="sequences"),
        pytest.param(too_long(), id="context"),
    ],
)
def test_a_step_larger_than_the_spec_is_refused(batch: Batch) -> None:
    with pytest.raises(FakeBackendError, match="larger than the backend's spec"):
        FakeBackend(SPEC).submit(batch)


def test_the_protocol_is_kept() -> None:
    backend = FakeBackend(SPEC)
    with pytest.raises(FakeBackendError, match="no step is in flight"):
        backend.collect()
    batch = build_batch(0, [One([1]).item()], 4, [], VOCAB)
    backend.submit(batch)
    backend.submit(batch)
    with pytest.raises(FakeBackendError, match="in flight"):
        backend.submit(batch)
    backend.close()
    with pytest.raises(FakeBackendError, match="closed"):
        backend.submit(batch)
