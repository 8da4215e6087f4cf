"""The two crossings of a step: a `Batch` goes down to a backend, a `StepResult` comes up.

Both are frozen sets of C-contiguous arrays with one fixed buffer layout, so that a tensor-parallel rank, a replay file
and a test get the same bytes. All index arithmetic of a step lives in this file; every backend and the fake use it.

Letters: T tokens, S sequences, R output rows, G KV groups, B blocks per sequence (padded with -1), C copies, P position
components (1; 3 for multimodal rope), M masks, V vocabulary, K most-likely alternatives.

    sequence s owns tokens [cu_seqlens_q[s], cu_seqlens_q[s + 1]) of this step; they are its positions
    [seq_lens[s] - q_len, seq_lens[s]). seq_lens counts the KV present after the step.
    slot = block_id * block_size + position % block_size, per KV group.
"""

from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import numpy.typing as npt

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
    block_copies: I32  # [C, 3] (group, source block, destination block), done before the step writes
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
    signals: F32  # [R, 4] logprob, entropy (nats), margin (top-1 minus top-2 logit), mask mass
    status: U8  # [S] RowStatus
    hidden: F32  # [0, 0] unless asked
    started_ns: int
    ended_ns: int
    phase_ns: I64  # time per named phase of the backend; may be empty
