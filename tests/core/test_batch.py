"""Batch: the builder's index arithmetic, the checks, and the buffer layout."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.batch import Batch, BatchError, OutputFlag, StepResult, check_batch
from headrace.core.batch_builder import BatchBuilder, ScheduledSequence, build_batch
from headrace.core.buffer import ALIGNMENT, BufferLayoutError
from headrace.core.penalties import PenaltyHistory
from headrace.core.request import Request, SamplingParams

VOCAB = 100
NUM_BLOCKS = (40, 40)


def scheduled(
    prompt: int, computed: int, count: int, output: int = 0, first_row: int = 1 << 62, base: int = 0, **params: object
) -> ScheduledSequence:
    """A sequence whose tables in the two groups are [base, base + 1, ...] and the same reversed."""
    request = Request("r", list(range(prompt)), SamplingParams(**params), 0)
    request.output_token_ids = [50 + i for i in range(output)]
    request.num_computed_tokens = computed
    table = np.arange(base, base + -(-(computed + count) // 4), dtype=np.int32)
    history = PenaltyHistory(request) if params.get("repetition_penalty") else None
    return ScheduledSequence(request, computed, count, (table, table[::-1].copy()), first_row, history=history)


def build(*sequences: ScheduledSequence) -> Batch:
    batch = build_batch(3, sequences, 4, [(0, 1, 2)], VOCAB)
    check_batch(batch, NUM_BLOCKS, 4, VOCAB)
    return batch


def test_tokens_positions_and_slots_of_a_mixed_step() -> None:
    """A chunk of a prompt beside a sequence that decodes."""
    batch = build(scheduled(10, 2, 5), scheduled(3, 4, 1, output=2, base=10))
    assert batch.input_ids.tolist() == [2, 3, 4, 5, 6, 51]
    assert batch.positions.tolist() == [[2, 3, 4, 5, 6, 4]]
    assert batch.cu_seqlens_q.tolist() == [0, 5, 6]
    assert batch.seq_lens.tolist() == [7, 5]
    assert batch.block_tables[0].tolist() == [[0, 1], [10, 11]]
    assert batch.slot_mapping[0].tolist() == [2, 3, 4, 5, 6, 44]
    assert batch.slot_mapping[1].tolist() == [6, 7, 0, 1, 2, 40]
    assert batch.output_rows.tolist() == [5]  # the chunk does not reach the prompt's end
    assert batch.sampling.position.tolist() == [5]
    assert batch.block_copies.tolist() == [[0, 1, 2]]


def test_tables_of_unequal_length_are_padded() -> None:
    batch = build(scheduled(9, 8, 1), scheduled(2, 1, 1, base=10))
    assert batch.block_tables[0].tolist() == [[0, 1, 2], [10, -1, -1]]


def test_prompt_logprob_rows_cover_the_prompt_once_whatever_the_chunks() -> None:
    targets: list[int] = []
    for start, count in ((0, 3), (3, 1), (4, 4)):
        batch = build(scheduled(8, start, count, first_row=0, prompt_logprobs=2, logprobs=1))
        prompt = batch.output_flags == OutputFlag.PROMPT_LOGPROBS
        assert (batch.sampling.num_logprobs[prompt] == 2).all()
        targets.extend(batch.target_ids[prompt].tolist())
    assert targets == [1, 2, 3, 4, 5, 6, 7]
    assert batch.output_flags.tolist()[-1] == OutputFlag.SAMPLE | OutputFlag.LOGPROBS
    assert batch.sampling.num_logprobs.tolist()[-1] == 1


def test_rows_that_were_reported_are_not_repeated() -> None:
    batch = build(scheduled(8, 0, 8, first_row=5, prompt_logprobs=0))
    assert batch.output_rows.tolist() == [5, 6, 7]


def test_min_tokens_forbids_the_stop_ids_and_only_until_then() -> None:
    params = {"min_tokens": 2, "stop_token_ids": (7, 8), "logit_bias": ((7, 3.0), (9, 1.5))}
    early = build(scheduled(3, 3, 1, output=1, **params)).sampling
    assert dict(zip(early.bias_ids.tolist(), early.bias_values.tolist(), strict=True)) == {
        7: -np.inf,
        9: 1.5,
        8: -np.inf,
    }
    late = build(scheduled(3, 4, 1, output=2, **params)).sampling
    assert dict(zip(late.bias_ids.tolist(), late.bias_values.tolist(), strict=True)) == {7: 3.0, 9: 1.5}


def test_penalties_count_the_output_and_list_the_prompt() -> None:
    batch = build(scheduled(2, 0, 2), scheduled(3, 4, 1, output=2, base=10, repetition_penalty=1.5))
    rows = batch.sampling
    assert rows.penalty_cu.tolist() == [0, 0, 5]
    assert rows.penalty_ids.tolist() == [0, 1, 2, 50, 51]
    assert rows.penalty_counts.tolist() == [0, 0, 0, 1, 1]
    assert rows.repetition_penalty.tolist() == [1.0, 1.5]


@pytest.mark.parametrize(("asked", "used"), [(0.0, 0.0), (1e-40, 0.0), (9e-5, 0.0), (1e-4, 1e-4), (0.7, 0.7)])
def test_a_temperature_that_would_overflow_is_greedy(asked: float, used: float) -> None:
    assert build(scheduled(2, 0, 2, temperature=asked)).sampling.temperature.tolist() == [np.float32(used)]


def test_seeds_keep_all_64_bits() -> None:
    assert build(scheduled(2, 0, 2, seed=(1 << 64) - 1)).sampling.seed.tolist() == [(1 << 64) - 1]


def every_array(batch: Batch) -> dict[str, list[np.ndarray]]:
    out: dict[str, list[np.ndarray]] = {}
    for owner in (batch, batch.sampling):
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name)
            if isinstance(value, np.ndarray):
                out[field.name] = [value]
            elif isinstance(value, tuple):
                out[field.name] = list(value)
    return out


def sample_batches() -> list[Batch]:
    return [
        build(
            scheduled(10, 2, 5), scheduled(3, 4, 1, output=2, base=10, repetition_penalty=1.5, logit_bias=((3, 1.0),))
        ),
        build(scheduled(8, 0, 8, first_row=0, prompt_logprobs=2)),
        build(scheduled(8, 0, 3)),  # no rows at all
    ]


@pytest.mark.parametrize("batch", sample_batches())
def test_a_batch_survives_its_buffer(batch: Batch) -> None:
    buffer = batch.to_buffer()
    copy = Batch.from_buffer(buffer)
    assert copy.step_id == 3
    before, after = every_array(batch), every_array(copy)
    assert before.keys() == after.keys()
    for name, arrays in before.items():
        assert len(arrays) == len(after[name])
        for old, new in zip(arrays, after[name], strict=True):
            assert old.dtype == new.dtype and old.shape == new.shape, name
            assert np.array_equal(old, new, equal_nan=True), name
            assert not new.size or not new.flags.writeable, name
            assert new.ctypes.data % old.dtype.itemsize == 0
    assert copy.to_buffer() == buffer
    check_batch(copy, NUM_BLOCKS, 4, VOCAB)


def test_a_result_survives_its_buffer() -> None:
    result = StepResult(
        step_id=9,
        token_ids=np.array([4], np.int32),
        cu_tokens=np.array([0, 1, 1], np.int32),
        num_accepted=np.zeros(2, np.int32),
        logprobs=np.array([[-1.0, np.nan]], np.float32),
        top_ids=np.array([[-1]], np.int32),
        signals=np.zeros((1, 4), np.float32),
        status=np.array([0, 1], np.uint8),
        hidden=np.empty((0, 0), np.float32),
        started_ns=5,
        ended_ns=1 << 60,
        phase_ns=np.array([1, 2], np.int64),
    )
    buffer = result.to_buffer()
    copy = StepResult.from_buffer(buffer)
    assert (copy.step_id, copy.started_ns, copy.ended_ns) == (9, 5, 1 << 60)
    assert copy.to_buffer() == buffer
    assert np.array_equal(copy.logprobs, result.logprobs, equal_nan=True)


def test_a_buffer_is_never_taken_for_another_kind() -> None:
    with pytest.raises(BufferLayoutError, match="starts with"):
        StepResult.from_buffer(sample_batches()[0].to_buffer())


def test_a_wrong_dtype_is_refused_on_the_way_in() -> None:
    batch = dataclasses.replace(sample_batches()[0], input_ids=np.zeros(6, np.int64))
    with pytest.raises(BufferLayoutError, match="input_ids is int64"):
        batch.to_buffer()


def test_fields_that_disagree_on_the_groups_are_refused() -> None:
    batch = sample_batches()[0]
    with pytest.raises(BufferLayoutError, match="slot_mapping holds 1 groups"):
        dataclasses.replace(batch, slot_mapping=batch.slot_mapping[:1]).to_buffer()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_buffer_gives_a_typed_error_or_equal_sizes(data: st.DataObject) -> None:
    """Cut anywhere, or one header byte flipped: never a crash, never a view beyond the buffer."""
    buffer = bytearray(sample_batches()[0].to_buffer())
    if data.draw(st.booleans()):
        del buffer[data.draw(st.integers(0, len(buffer) - 1)) :]
    else:
        buffer[data.draw(st.integers(0, 8 * 60))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        batch = Batch.from_buffer(bytes(buffer))
    except BufferLayoutError:
        return
    assert sum(array.nbytes for arrays in every_array(batch).values() for array in arrays) <= len(buffer)


def test_arrays_start_at_aligned_offsets() -> None:
    buffer = sample_batches()[0].to_buffer()
    base = np.frombuffer(buffer, np.uint8).ctypes.data
    batch = Batch.from_buffer(buffer)
    assert (batch.input_ids.ctypes.data - base) % ALIGNMENT == 0
    assert (batch.sampling.seed.ctypes.data - base) % ALIGNMENT == 0


def damaged(batch: Batch, name: str, index: object, value: int) -> Batch:
    holder = batch.sampling if hasattr(batch.sampling, name) else batch
    field = getattr(holder, name)
    array = (field[0] if isinstance(field, tuple) else field).copy()
    array[index] = value
    changed = dataclasses.replace(holder, **{name: (array, *field[1:]) if isinstance(field, tuple) else array})
    return changed if isinstance(changed, Batch) else dataclasses.replace(batch, sampling=changed)


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("input_ids", 0, VOCAB),
        ("input_ids", 0, -1),
        ("positions", (0, 1), 9),
        ("seq_lens", 0, 4),
        ("cu_seqlens_q", 1, 0),
        ("cu_seqlens_q", 2, 5),
        ("block_tables", (0, 0), 40),
        ("block_tables", (0, 0), -1),
        ("slot_mapping", 0, 3),
        ("output_rows", 0, 6),
        ("mask_row", 0, 0),
        ("bias_cu", 1, 0),
        ("penalty_cu", 1, 9),
    ],
)
def test_check_batch_names_what_is_wrong(name: str, index: object, value: int) -> None:
    batch = sample_batches()[0]
    with pytest.raises(BatchError, match=name):
        check_batch(damaged(batch, name, index, value), NUM_BLOCKS, 4, VOCAB)


def test_check_batch_sees_two_sequences_that_write_one_slot() -> None:
    batch = build_batch(0, [scheduled(2, 0, 2), scheduled(2, 0, 2)], 4, [], VOCAB)
    with pytest.raises(BatchError, match="two tokens write one slot"):
        check_batch(batch, NUM_BLOCKS, 4, VOCAB)


@pytest.mark.parametrize(
    "params", [{}, {"logprobs": 2}, {"min_tokens": 3, "stop_token_ids": (7,)}, {"repetition_penalty": 1.1}], ids=str
)
def test_steps_that_follow_each_other_are_what_each_is_alone(params: dict[str, object]) -> None:
    """Through the prompt, then decoding over block borders; another sequence comes, and the first one leaves."""
    builder, handed_out = BatchBuilder(4, VOCAB), []
    ours = [scheduled(6, 0, 6, **params), scheduled(3, 0, 3, base=20)]
    for step in range(16):
        if step == 9:
            ours.append(scheduled(2, 0, 2, base=30))
        if step == 13:
            del ours[0]
        batch, alone = builder.build(step, ours, []), build_batch(step, ours, 4, [], VOCAB)
        check_batch(batch, NUM_BLOCKS, 4, VOCAB)
        assert batch.to_buffer() == alone.to_buffer()
        handed_out.append((batch, batch.to_buffer()))
        ours = [following(item, 50 + step) for item in ours]
    assert all(batch.to_buffer() == buffer for batch, buffer in handed_out)


def following(item: ScheduledSequence, token: int) -> ScheduledSequence:
    """The step after `item`, which chose `token`. Tables are the same object where they are the same."""
    item.request.output_token_ids.append(token)
    if item.history is not None:
        item.history.add(token)
    tables = item.block_tables
    if item.end % 4 == 0:
        tables = tuple(np.append(table, np.int32(max(table) + 1)) for table in tables)
    return ScheduledSequence(item.request, item.end, 1, tables, history=item.history)
