"""Turns scheduled sequences into Batches. All index arithmetic of a step is here.

For a sequence with `c` computed tokens, `n` scheduled now and a prompt of `P` tokens, output rows are

    positions [max(c, first_row), min(c + n, P - 1))   PROMPT_LOGPROBS: row p reports the logprob of prompt token p + 1
    position  num_tokens - 1, if it is computed now    SAMPLE (unless nothing may be sampled)

where first_row is the first position whose prompt logprob is still owed (P - 1 or more: none is).
It decides nothing: which tokens to compute, which blocks to use and whether to sample are given.

Steps of pure decoding follow each other by the thousand: the same sequences, one token and one sample row each. What
depends only on who is in such a step is kept from one to the next; arrays that were handed out never change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.batch import I32, Batch, OutputFlag, SamplingRows
from headrace.core.kv_cache import BlockCopy
from headrace.core.penalties import PenaltyHistory
from headrace.core.request import Request, SamplingParams


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """Part of one step; not changed once made."""

    request: Request
    start: int  # computed tokens before the step
    num_scheduled_tokens: int
    block_tables: tuple[I32, ...]  # one per KV group, covering every token up to the last scheduled one
    first_row: int = 1 << 62  # see above; beyond the prompt: no prompt logprobs
    samples: bool = True  # False for max_tokens = 0
    history: PenaltyHistory | None = None
    end: int = field(init=False)
    prompt_rows: range = field(init=False)  # positions of PROMPT_LOGPROBS rows in this step
    has_sample_row: bool = field(init=False)
    num_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.start + self.num_scheduled_tokens
        self.has_sample_row = self.samples and self.end == self.request.num_tokens
        self.prompt_rows = _NO_ROWS
        if self.first_row < self.end:
            start = max(self.start, self.first_row)
            self.prompt_rows = range(start, max(start, min(self.end, self.request.num_prompt_tokens - 1)))
        self.num_rows = len(self.prompt_rows) + self.has_sample_row


_NO_ROWS = range(0)


@dataclass(slots=True)
class _Rows:
    """Columns of the output rows, while they are collected."""

    indices: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    floats: list[tuple[float, ...]] = field(default_factory=list)  # temperature ... frequency_penalty
    integers: list[tuple[int, ...]] = field(default_factory=list)  # top_k, choice, position, num_logprobs
    seeds: list[int] = field(default_factory=list)
    biases: list[dict[int, float]] = field(default_factory=list)
    histories: list[PenaltyHistory | None] = field(default_factory=list)


_NO_BIAS: dict[int, float] = {}
_NONE = np.empty(0, np.int32)
_NO_COPIES = np.empty((0, 3), np.int32)
_NO_EMBEDS = np.empty((0, 0), np.float32)
COLDEST = 1e-4  # a lower temperature is greedy: dividing by it would overflow float32, and the outcome is the same
_NEUTRAL = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)


def build_batch(
    step_id: int, sequences: Sequence[ScheduledSequence], block_size: int, copies: Sequence[BlockCopy], vocab_size: int
) -> Batch:
    """The Batch of a step on its own."""
    return BatchBuilder(block_size, vocab_size).build(step_id, sequences, copies)


class BatchBuilder:
    """Makes the Batches of an engine, one step after another."""

    def __init__(self, block_size: int, vocab_size: int) -> None:
        self._block_size = block_size
        self._no_masks = np.empty((0, -(-vocab_size // 32)), np.int32)
        self._requests: list[Request] = []  # of the step before
        self._decoding: Batch | None = None  # the step before, if another can be made after it
        self._tables: list[tuple[I32, ...]] = []  # of the step before; the same object has the same content
        self._padded: tuple[I32, ...] = ()

    def build(self, step_id: int, sequences: Sequence[ScheduledSequence], copies: Sequence[BlockCopy]) -> Batch:
        """Sequences keep their order; their rows are ascending within and across sequences."""
        requests = [sequence.request for sequence in sequences]
        before = self._decoding if requests == self._requests else None
        decodes = all(item.num_scheduled_tokens == 1 == item.num_rows and item.has_sample_row for item in sequences)
        if before is not None and decodes:
            batch = self._decode_on(before, step_id, sequences, copies)
        else:
            batch = self._whole(step_id, sequences, copies)
        is_plain = not (len(batch.sampling.bias_ids) or len(batch.sampling.penalty_ids))
        self._decoding = batch if decodes and is_plain else None
        self._requests = requests
        return batch

    def _whole(self, step_id: int, sequences: Sequence[ScheduledSequence], copies: Sequence[BlockCopy]) -> Batch:
        input_ids: list[int] = []
        token_positions: list[int] = []
        cu_seqlens = [0]
        rows = _Rows()
        for sequence in sequences:
            _append_rows(rows, sequence, len(input_ids) - sequence.start)
            input_ids.extend(sequence.request.token_range(sequence.start, sequence.end))
            token_positions.extend(range(sequence.start, sequence.end))
            cu_seqlens.append(len(input_ids))
        num_seqs = len(sequences)
        positions = _i32(token_positions)
        owner = np.repeat(np.arange(num_seqs), [sequence.num_scheduled_tokens for sequence in sequences])
        tables = self._block_tables(sequences)
        return Batch(
            step_id=step_id,
            input_ids=_i32(input_ids),
            token_source=np.full(len(input_ids), -1, np.int32),
            positions=positions[np.newaxis],
            cu_seqlens_q=_i32(cu_seqlens),
            seq_lens=_i32([sequence.end for sequence in sequences]),
            adapter_ids=_i32([sequence.request.adapter_id for sequence in sequences]),
            block_tables=tables,
            slot_mapping=tuple(_slots(table, owner, positions, self._block_size) for table in tables),
            state_slots=np.full(num_seqs, -1, np.int32),
            block_copies=_copies(copies),
            embed_rows=_NONE,
            embeds=_NO_EMBEDS,
            output_rows=_i32(rows.indices),
            output_flags=np.array(rows.flags, np.uint8),
            target_ids=_i32(rows.targets),
            num_draft_tokens=np.zeros(num_seqs, np.int32),
            draft_token_ids=_NONE,
            sampling=_sampling(rows),
            mask_row=np.full(len(rows.indices), -1, np.int32),
            mask_bits=self._no_masks,
        )

    def _decode_on(
        self, before: Batch, step_id: int, sequences: Sequence[ScheduledSequence], copies: Sequence[BlockCopy]
    ) -> Batch:
        """The next token of each sequence of `before`. What does not move with the position is taken over."""
        seq_lens = _i32([sequence.end for sequence in sequences])
        positions = seq_lens - np.int32(1)
        tables = self._block_tables(sequences)
        owner = before.output_rows  # row, token and sequence are the same number
        return replace(
            before,
            step_id=step_id,
            input_ids=_i32([sequence.request.output_token_ids[-1] for sequence in sequences]),
            positions=positions[np.newaxis],
            seq_lens=seq_lens,
            block_tables=tables,
            slot_mapping=tuple(_slots(table, owner, positions, self._block_size) for table in tables),
            block_copies=_copies(copies),
            sampling=replace(before.sampling, position=seq_lens),
        )

    def _block_tables(self, sequences: Sequence[ScheduledSequence]) -> tuple[I32, ...]:
        """Per group [S, B], padded with -1. Where few rows differ from the step before, only those are written."""
        before, padded = self._tables, self._padded
        tables = self._tables = [sequence.block_tables for sequence in sequences]
        if len(tables) == len(before):
            moved = [s for s, (now, then) in enumerate(zip(tables, before, strict=True)) if now is not then]
            if not moved:
                return padded
            if 2 * len(moved) <= len(tables) and all(_fits(padded, tables[s]) for s in moved):
                self._padded = tuple(_with_rows(array, g, moved, tables) for g, array in enumerate(padded))
                return self._padded
        self._padded = tuple(map(_pad_tables, zip(*tables, strict=True)))
        return self._padded


def _append_rows(rows: _Rows, sequence: ScheduledSequence, offset: int) -> None:
    """`offset`: index in T of the sequence's position 0, were it in this step."""
    request = sequence.request
    params = request.params
    for position in sequence.prompt_rows:
        rows.indices.append(offset + position)
        rows.flags.append(OutputFlag.PROMPT_LOGPROBS)
        rows.targets.append(request.prompt_token_ids[position + 1])
        rows.floats.append(_NEUTRAL)
        rows.integers.append((0, request.choice, position + 1, params.prompt_logprobs or 0))
        rows.seeds.append(params.seed)
        rows.biases.append(_NO_BIAS)
        rows.histories.append(None)
    if not sequence.has_sample_row:
        return
    rows.indices.append(offset + request.num_tokens - 1)
    rows.flags.append(OutputFlag.SAMPLE if params.logprobs is None else OutputFlag.SAMPLE | OutputFlag.LOGPROBS)
    rows.targets.append(-1)
    rows.floats.append(
        (
            params.temperature if params.temperature >= COLDEST else 0.0,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
    )
    num_logprobs = -1 if params.logprobs is None else params.logprobs
    rows.integers.append((params.top_k, request.choice, request.num_tokens, num_logprobs))
    rows.seeds.append(params.seed)
    rows.biases.append(_biases(params, request.num_output_tokens))
    rows.histories.append(sequence.history)


def _biases(params: SamplingParams, num_output_tokens: int) -> dict[int, float]:
    """What is added to logits: the user's logit_bias, and -inf on the stop ids while min_tokens is not reached."""
    forbids = num_output_tokens < params.min_tokens
    if not forbids and not params.logit_bias:
        return _NO_BIAS
    biases = dict(params.logit_bias)
    if forbids:
        biases.update(dict.fromkeys(params.stop_token_ids, -np.inf))
    return biases


def _sampling(rows: _Rows) -> SamplingRows:
    floats = np.array(rows.floats, np.float32).reshape(-1, 6).T.copy()
    integers = np.array(rows.integers, np.int32).reshape(-1, 4).T.copy()
    histories = [history for history in rows.histories if history is not None]
    return SamplingRows(
        temperature=floats[0],
        top_p=floats[1],
        min_p=floats[2],
        repetition_penalty=floats[3],
        presence_penalty=floats[4],
        frequency_penalty=floats[5],
        top_k=integers[0],
        choice=integers[1],
        position=integers[2],
        num_logprobs=integers[3],
        seed=np.array(rows.seeds, np.uint64),
        bias_cu=_cumulative([len(biases) for biases in rows.biases]),
        bias_ids=_i32([token for biases in rows.biases for token in biases]),
        bias_values=np.array([value for biases in rows.biases for value in biases.values()], np.float32),
        penalty_cu=_cumulative([0 if history is None else len(history.ids) for history in rows.histories]),
        penalty_ids=np.concatenate([history.ids for history in histories]) if histories else _NONE,
        penalty_counts=np.concatenate([history.counts for history in histories]) if histories else _NONE,
    )


def _i32(values: Sequence[object]) -> I32:
    return np.array(values, np.int32)


def _cumulative(counts: list[int]) -> I32:
    return _i32([0, *accumulate(counts)])


def _copies(copies: Sequence[BlockCopy]) -> I32:
    return _i32(copies).reshape(len(copies), 3) if copies else _NO_COPIES


def _fits(padded: tuple[I32, ...], row: tuple[I32, ...]) -> bool:
    return all(len(table) <= array.shape[1] for array, table in zip(padded, row, strict=True))


def _with_rows(array: I32, group: int, rows: Sequence[int], tables: Sequence[tuple[I32, ...]]) -> I32:
    """A copy: the array itself belongs to a Batch."""
    out = array.copy()
    for row in rows:
        table = tables[row][group]
        out[row, : len(table)] = table
        out[row, len(table) :] = -1
    return out


def _pad_tables(tables: tuple[I32, ...]) -> I32:
    out = np.full((len(tables), max(map(len, tables))), -1, np.int32)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = table
    return out


def _slots(table: I32, owner: npt.NDArray[np.integer[Any]], positions: I32, block_size: int) -> I32:
    size = np.int32(block_size)
    block: I32 = table[owner, positions // size]
    return block * size + positions % size
