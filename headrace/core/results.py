"""Splits a StepResult into what each scheduled sequence got: tokens, logprobs, and whether its numbers were finite."""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.batch import Batch, RowStatus, StepResult
from headrace.core.batch_builder import ScheduledSequence
from headrace.core.outputs import TokenLogprob

_NON_FINITE = int(RowStatus.NON_FINITE)


class SequenceResult(NamedTuple):
    finite: bool
    num_rows: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None  # parallel to token_ids
    prompt_logprobs: list[TokenLogprob] | None


def split_result(batch: Batch, result: StepResult, scheduled: Sequence[ScheduledSequence]) -> list[SequenceResult]:
    """One entry per sequence of the batch, in its order."""
    tokens, bounds, status = result.token_ids.tolist(), result.cu_tokens.tolist(), result.status.tolist()
    parts = []
    row = 0
    for s, item in enumerate(scheduled):
        chosen = tokens[bounds[s] : bounds[s + 1]]
        num_rows = item.num_rows
        num_prompt_rows = num_rows - item.has_sample_row
        logprobs = prompt_logprobs = None
        if chosen and item.request.params.logprobs is not None:
            logprobs = _logprobs(batch, result, row + num_prompt_rows, chosen)
        if num_prompt_rows:
            targets = batch.target_ids[row : row + num_prompt_rows].tolist()
            prompt_logprobs = _logprobs(batch, result, row, targets)
        parts.append(SequenceResult(not status[s] & _NON_FINITE, num_rows, chosen, logprobs, prompt_logprobs))
        row += num_rows
    return parts


def _logprobs(batch: Batch, result: StepResult, first: int, token_ids: list[int]) -> list[TokenLogprob]:
    """Rows [first, first + len(token_ids)), each about the token beside it."""
    out = []
    for row, token in enumerate(token_ids, first):
        k = int(batch.sampling.num_logprobs[row])
        values = result.logprobs[row].tolist()
        top = list(zip(result.top_ids[row, :k].tolist(), values[1 : 1 + k], strict=True))
        out.append(TokenLogprob(token, values[0], top))
    return out
