"""The two crossings of a step: a `Batch` goes down to a backend, a `StepResult` comes up.

Both are frozen sets of C-contiguous arrays with one fixed buffer layout, so that a tensor-parallel rank, a replay file
and a test get the same bytes. This file says what the arrays mean and checks it; `batch_builder` makes them, and holds
all index arithmetic of a step, which every backend and the fake rely on.

Letters: T tokens, S sequences, R output rows, G KV groups, B blocks per sequence (padded with -1), C copies, P position
components (1; 3 for multimodal rope), M masks, V vocabulary, K most-likely alternatives.
A block table also holds -1 for blocks that a windowed group has let go: no query of the step may look there.

    sequence s owns tokens [cu_seqlens_q[s], cu_seqlens_q[s + 1]) of this step; they are its positions
    [seq_lens[s] - q_len, seq_lens[s]). seq_lens counts the KV present after the step.
    slot = block_id * block_size + position % block_size, per KV group.
"""

from dataclasses import dataclass, fields
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from headrace.base.errors import HeadraceError
from headrace.core.buffer import ArraySpec, Layout, pack, unpack

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


class OutputFlag(IntFlag):
    SAMPLE = 1  # choose the next token from this row
    LOGPROBS = 2  # and report logprobs of the choice
    PROMPT_LOGPROBS = 4  # report the logprob of target_ids[row], which is a prompt token
    HIDDEN = 8
    VERIFY = 16


class RowStatus(IntFlag):
    """StepResult.status: what went wrong for one sequence. It fails alone."""

    OK = 0
    NON_FINITE = 1


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How to choose, one entry per output row (R). CSR arrays hold only the rows that need them."""

    temperature: F32
    top_k: I32  # 0: off
    top_p: F32
    min_p: F32
    repetition_penalty: F32
    presence_penalty: F32
    frequency_penalty: F32
    seed: U64
    choice: I32
    position: I32  # index of the token to be chosen in prompt + output: the counter of the generator
    num_logprobs: I32  # K of this row; -1: no logprobs at all
    bias_cu: I32  # [R + 1]
    bias_ids: I32
    bias_values: F32  # added to the logit; -inf forbids (min_tokens forbids the stop ids this way)
    penalty_cu: I32  # [R + 1]
    penalty_ids: I32  # distinct ids seen in prompt or output
    penalty_counts: I32  # occurrences in the *output*; 0: only in the prompt (repetition penalty counts both)


@dataclass(frozen=True, slots=True)
class Batch:
    step_id: int
    input_ids: I32  # [T]
    token_source: I32  # [T] -1, or the row of the previous step's sampled tokens to take the id from
    positions: I32  # [P, T]
    cu_seqlens_q: I32  # [S + 1]
    seq_lens: I32  # [S]
    adapter_ids: I32  # [S]
    block_tables: tuple[I32, ...]  # G x [S, B]
    slot_mapping: tuple[I32, ...]  # G x [T]
    state_slots: I32  # [S]
    block_copies: I32  # [C, 3] (group, source block, destination block), done in this order before the step writes
    embed_rows: I32  # [E] rows of T whose embedding comes from `embeds`
    embeds: F32  # [E, H]
    output_rows: I32  # [R] indices into T, ascending
    output_flags: U8  # [R] OutputFlag
    target_ids: I32  # [R] the prompt token that a PROMPT_LOGPROBS row predicts; -1 elsewhere
    num_draft_tokens: I32  # [S]
    draft_token_ids: I32
    sampling: SamplingRows
    mask_row: I32  # [R] row of mask_bits, or -1
    mask_bits: I32  # [M, ceil(V / 32)] bit set: allowed

    def to_buffer(self) -> bytes:
        values = {name: getattr(self, name) for name in ("step_id", *_BATCH_FIELDS)}
        values.update({name: getattr(self.sampling, name) for name in _SAMPLING_FIELDS})
        return pack(BATCH_LAYOUT, values)

    @staticmethod
    def from_buffer(buffer: bytes | memoryview) -> "Batch":
        """Read-only views of `buffer`, which must outlive them. Raises BufferLayoutError."""
        values = unpack(BATCH_LAYOUT, buffer)
        sampling = SamplingRows(**{name: values.pop(name) for name in _SAMPLING_FIELDS})
        return Batch(**values, sampling=sampling)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def num_rows(self) -> int:
        return len(self.output_rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    token_ids: I32  # [N]
    cu_tokens: I32  # [S + 1] 0 to k + 1 tokens a sequence: speculation needs no new path
    num_accepted: I32  # [S]
    logprobs: F32  # [R, 1 + K] column 0: the chosen (or target) token; then the K most likely; NaN where not asked
    top_ids: I32  # [R, K]; -1 where not asked
    signals: F32  # [R, 4] logprob, entropy (nats), margin (top-1 minus top-2 logit), mass the mask removes
    status: U8  # [S] RowStatus
    hidden: F32  # [0, 0] unless asked
    started_ns: int
    ended_ns: int
    phase_ns: I64  # time per named phase of the backend; may be empty

    def to_buffer(self) -> bytes:
        return pack(RESULT_LAYOUT, {field.name: getattr(self, field.name) for field in fields(self)})

    @staticmethod
    def from_buffer(buffer: bytes | memoryview) -> "StepResult":
        """Read-only views of `buffer`, which must outlive them. Raises BufferLayoutError."""
        return StepResult(**unpack(RESULT_LAYOUT, buffer))


_SAMPLING_SPECS = (
    ArraySpec("temperature", np.float32),
    ArraySpec("top_k", np.int32),
    ArraySpec("top_p", np.float32),
    ArraySpec("min_p", np.float32),
    ArraySpec("repetition_penalty", np.float32),
    ArraySpec("presence_penalty", np.float32),
    ArraySpec("frequency_penalty", np.float32),
    ArraySpec("seed", np.uint64),
    ArraySpec("choice", np.int32),
    ArraySpec("position", np.int32),
    ArraySpec("num_logprobs", np.int32),
    ArraySpec("bias_cu", np.int32),
    ArraySpec("bias_ids", np.int32),
    ArraySpec("bias_values", np.float32),
    ArraySpec("penalty_cu", np.int32),
    ArraySpec("penalty_ids", np.int32),
    ArraySpec("penalty_counts", np.int32),
)
_BATCH_SPECS = (
    ArraySpec("input_ids", np.int32),
    ArraySpec("token_source", np.int32),
    ArraySpec("positions", np.int32, 2),
    ArraySpec("cu_seqlens_q", np.int32),
    ArraySpec("seq_lens", np.int32),
    ArraySpec("adapter_ids", np.int32),
    ArraySpec("block_tables", np.int32, 2, grouped=True),
    ArraySpec("slot_mapping", np.int32, 1, grouped=True),
    ArraySpec("state_slots", np.int32),
    ArraySpec("block_copies", np.int32, 2),
    ArraySpec("embed_rows", np.int32),
    ArraySpec("embeds", np.float32, 2),
    ArraySpec("output_rows", np.int32),
    ArraySpec("output_flags", np.uint8),
    ArraySpec("target_ids", np.int32),
    ArraySpec("num_draft_tokens", np.int32),
    ArraySpec("draft_token_ids", np.int32),
    ArraySpec("mask_row", np.int32),
    ArraySpec("mask_bits", np.int32, 2),
)
_SAMPLING_FIELDS = tuple(spec.name for spec in _SAMPLING_SPECS)
_BATCH_FIELDS = tuple(spec.name for spec in _BATCH_SPECS)
BATCH_LAYOUT = Layout(0x31_48_43_54_42_52_48, ("step_id",), _BATCH_SPECS + _SAMPLING_SPECS)
RESULT_LAYOUT = Layout(
    0x31_54_4C_53_52_52_48,
    ("step_id", "started_ns", "ended_ns"),
    (
        ArraySpec("token_ids", np.int32),
        ArraySpec("cu_tokens", np.int32),
        ArraySpec("num_accepted", np.int32),
        ArraySpec("logprobs", np.float32, 2),
        ArraySpec("top_ids", np.int32, 2),
        ArraySpec("signals", np.float32, 2),
        ArraySpec("status", np.uint8),
        ArraySpec("hidden", np.float32, 2),
        ArraySpec("phase_ns", np.int64),
    ),
)


class BatchError(HeadraceError):
    """A Batch contradicts itself or the backend that shall run it: a defect in whoever built it."""


def check_batch(batch: Batch, num_blocks: tuple[int, ...], block_size: int, vocab_size: int) -> None:
    """Checks every index of a Batch against every other. Linear in its size. Raises BatchError naming the array."""
    _check_shapes(batch, len(num_blocks))
    lengths = np.diff(batch.cu_seqlens_q)
    _require(bool((lengths > 0).all()), "cu_seqlens_q: every sequence has at least one token")
    _require(bool((batch.seq_lens >= lengths).all()), "seq_lens: below the tokens of this step")
    owner = np.repeat(np.arange(batch.num_seqs), lengths)
    offset = np.arange(batch.num_tokens) - batch.cu_seqlens_q[:-1][owner]
    expected = (batch.seq_lens - lengths)[owner] + offset
    _require(bool((batch.positions == expected).all()), "positions: not the last ones of their sequence")
    known = batch.token_source < 0
    ids = batch.input_ids[known]
    _require(bool(((ids >= 0) & (ids < vocab_size)).all()), "input_ids: outside the vocabulary")
    for group, count in enumerate(num_blocks):
        table, slots = batch.block_tables[group], batch.slot_mapping[group]
        _require(bool(((table >= -1) & (table < count)).all()), f"block_tables[{group}]: outside the pool")
        _require(table.shape[1] * block_size >= int(batch.seq_lens.max()), f"block_tables[{group}]: too narrow")
        blocks = table[owner, expected // block_size]
        _require(bool((blocks >= 0).all()), f"block_tables[{group}]: no block for a token of this step")
        _require(bool((slots == blocks * block_size + expected % block_size).all()), f"slot_mapping[{group}]: wrong")
        _require(len(np.unique(slots)) == len(slots), f"slot_mapping[{group}]: two tokens write one slot")
    rows = batch.output_rows
    _require(bool((np.diff(rows) > 0).all()), "output_rows: not ascending")
    _require(bool(((rows >= 0) & (rows < batch.num_tokens)).all()), "output_rows: beyond the tokens")
    _require(bool((batch.mask_row < len(batch.mask_bits)).all()), "mask_row: beyond mask_bits")


def _check_shapes(batch: Batch, num_groups: int) -> None:
    tokens, seqs, rows = batch.num_tokens, batch.num_seqs, batch.num_rows
    _require(tokens > 0 and seqs > 0, "input_ids, seq_lens: empty")
    _require(len(batch.block_tables) == len(batch.slot_mapping) == num_groups, "block_tables, slot_mapping: groups")
    per_token = (batch.token_source, *batch.slot_mapping)
    _require(all(len(array) == tokens for array in per_token), "token_source, slot_mapping: one entry a token")
    _require(batch.positions.shape[1] == tokens, "positions: one column a token")
    _require(len(batch.cu_seqlens_q) == seqs + 1, "cu_seqlens_q: one entry more than sequences")
    _require(batch.cu_seqlens_q[0] == 0 and batch.cu_seqlens_q[-1] == tokens, "cu_seqlens_q: does not cover the tokens")
    per_seq = (batch.adapter_ids, batch.state_slots, batch.num_draft_tokens, *batch.block_tables)
    _require(all(len(array) == seqs for array in per_seq), "adapter_ids, state_slots, ...: one entry a sequence")
    _require(batch.block_copies.shape[1] == 3, "block_copies: three columns")
    sampling = batch.sampling
    for spec in _SAMPLING_SPECS[:11]:
        _require(len(getattr(sampling, spec.name)) == rows, f"sampling.{spec.name}: one entry an output row")
    per_row = (batch.output_flags, batch.target_ids, batch.mask_row)
    _require(all(len(array) == rows for array in per_row), "output_flags, target_ids, mask_row: one entry a row")
    for cu, values in ((sampling.bias_cu, sampling.bias_ids), (sampling.penalty_cu, sampling.penalty_ids)):
        ascending = len(cu) == rows + 1 and cu[0] == 0 and cu[-1] == len(values) and bool((np.diff(cu) >= 0).all())
        _require(ascending, "sampling.bias_cu, penalty_cu: do not cover their values")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise BatchError(problem)
