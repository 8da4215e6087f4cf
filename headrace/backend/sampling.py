"""The sampler in plain NumPy: what the native one must agree with, and what the fake backend uses.

One row of logits in, one token out. Steps, in this order:

    1. raw logprobs and signals        log_softmax of the logits as given
    2. mask                            forbidden ids become -inf
    3. bias                            added
    4. repetition penalty              every seen id: logit > 0 is divided, else multiplied
    5. presence, frequency             ids with output count > 0: presence, and count * frequency, are subtracted
    6. temperature 0                   the largest logit; ties go to the lowest id. Else divide, and
    7. min_p                           keep logit >= max + log(min_p)
    8. top_k                           keep the first k in the order (logit descending, id ascending)
    9. top_p                           keep, in that order, the smallest prefix whose share of what is left is >= top_p
    10. draw                           u from Philox; walk kept ids upwards until cumulative > u * total

Logits are float32 up to step 6; sums are float64 over fixed blocks of 1,024 columns, in index order, so that a result
does not depend on how the work is cut. It knows no model and no scheduler.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.backend.philox import uniform
from headrace.core.batch import F32, I32, U8, Batch, OutputFlag, RowStatus, SamplingRows

SUM_BLOCK = 1024
F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """R rows. Shapes and fillers as in `StepResult`; token_ids is -1 where a row does not sample."""

    token_ids: I32
    logprobs: F32
    top_ids: I32
    signals: F32
    status: U8


def sample_batch(logits: F32, batch: Batch) -> SampledRows:
    """Samples every output row of a batch. `logits`: [R, V] as computed; not modified."""
    num_rows = batch.num_rows
    rows = batch.sampling
    k = max(0, int(rows.num_logprobs.max(initial=0)))
    out = SampledRows(
        token_ids=np.full(num_rows, -1, np.int32),
        logprobs=np.full((num_rows, 1 + k), np.nan, np.float32),
        top_ids=np.full((num_rows, k), -1, np.int32),
        signals=np.full((num_rows, 4), np.nan, np.float32),
        status=np.zeros(num_rows, np.uint8),
    )
    for row in range(num_rows):
        _sample_row(logits[row], batch, row, out)
    return out


def _sample_row(logits: F32, batch: Batch, row: int, out: SampledRows) -> None:
    if not _is_usable(logits):
        out.status[row] = RowStatus.NON_FINITE
        return
    rows = batch.sampling
    logprobs = log_softmax(logits)
    allowed = _allowed(batch, row, len(logits))
    token = int(batch.target_ids[row])
    if batch.output_flags[row] & OutputFlag.SAMPLE:
        adjusted = adjust(logits, rows, row, allowed)
        if not _is_usable(adjusted):
            out.status[row] = RowStatus.NON_FINITE
            return
        token = out.token_ids[row] = choose(adjusted, rows, row)
    out.signals[row] = _signals(logits, logprobs, token, allowed)
    num_logprobs = int(rows.num_logprobs[row])
    if num_logprobs >= 0:
        top = descending(logits)[:num_logprobs]
        out.logprobs[row, 0] = logprobs[token]
        out.logprobs[row, 1 : 1 + len(top)] = logprobs[top]
        out.top_ids[row, : len(top)] = top


def _is_usable(logits: F32) -> bool:
    """No NaN, no +inf, and something that is not -inf."""
    largest = logits.max()
    return bool(np.isfinite(largest))  # NaN wins max(); -inf as maximum: nothing is left


def _allowed(batch: Batch, row: int, vocab_size: int) -> Bool | None:
    index = int(batch.mask_row[row])
    if index < 0:
        return None
    words = np.ascontiguousarray(batch.mask_bits[index]).view(np.uint8)
    return np.unpackbits(words, bitorder="little")[:vocab_size].astype(np.bool_)


def adjust(logits: F32, rows: SamplingRows, row: int, allowed: Bool | None) -> F32:
    """Steps 2 to 5 on a copy."""
    out = logits.astype(np.float32, copy=True)
    if allowed is not None:
        out[~allowed] = -np.inf
    begin, end = rows.bias_cu[row], rows.bias_cu[row + 1]
    out[rows.bias_ids[begin:end]] += rows.bias_values[begin:end]
    begin, end = rows.penalty_cu[row], rows.penalty_cu[row + 1]
    ids, counts = rows.penalty_ids[begin:end], rows.penalty_counts[begin:end]
    values = out[ids]
    values = np.where(values > 0, values / rows.repetition_penalty[row], values * rows.repetition_penalty[row])
    values -= rows.presence_penalty[row] * (counts > 0)
    out[ids] = values - rows.frequency_penalty[row] * counts.astype(np.float32)
    return out


def choose(logits: F32, rows: SamplingRows, row: int) -> int:
    """Steps 6 to 10 on adjusted logits of which at least one is finite."""
    temperature = rows.temperature[row]
    if temperature == 0:
        return int(np.argmax(logits))
    scaled = logits / temperature
    kept = _kept(scaled, rows, row)
    weights = np.zeros(len(scaled))
    weights[kept] = np.exp(scaled[kept].astype(np.float64) - np.float64(scaled.max()))
    return _walk(weights, uniform(int(rows.seed[row]), int(rows.choice[row]), int(rows.position[row])))


def _kept(scaled: F32, rows: SamplingRows, row: int) -> npt.NDArray[np.int64]:
    """Ids that survive min_p, top_k and top_p."""
    kept = np.flatnonzero(scaled > -np.inf)
    largest = scaled.max()
    if rows.min_p[row] > 0:
        kept = kept[scaled[kept] >= largest + np.log(rows.min_p[row])]
    top_k, top_p = int(rows.top_k[row]), float(rows.top_p[row])
    if not (0 < top_k < len(kept)) and top_p >= 1:
        return kept
    kept = kept[descending(scaled[kept])]
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        cumulative = np.cumsum(np.exp(scaled[kept].astype(np.float64) - np.float64(largest)))
        kept = kept[: 1 + int(np.searchsorted(cumulative, top_p * cumulative[-1]))]
    return kept


def _walk(weights: F64, u: float) -> int:
    """The first id whose cumulative weight exceeds u * total, in blocks of SUM_BLOCK columns."""
    num_blocks = -(-len(weights) // SUM_BLOCK)
    padded = np.zeros(num_blocks * SUM_BLOCK)
    padded[: len(weights)] = weights
    within = np.cumsum(padded.reshape(num_blocks, SUM_BLOCK), axis=1)
    ends = np.cumsum(within[:, -1])
    target = u * ends[-1]
    block = int(np.searchsorted(ends, target, side="right"))
    if block < num_blocks:
        before = ends[block - 1] if block else 0.0
        column = int(np.searchsorted(before + within[block], target, side="right"))
        if column < SUM_BLOCK:
            return block * SUM_BLOCK + column
    return int(np.flatnonzero(weights)[-1] if block >= num_blocks else _last_in_block(padded, block))


def _last_in_block(padded: F64, block: int) -> int:
    """The last kept id of a block: rounding put the target beyond the block's own running sum."""
    return int(np.flatnonzero(padded[: (block + 1) * SUM_BLOCK])[-1])


def descending(values: F32) -> npt.NDArray[np.int64]:
    """Indices in the order (value descending, index ascending)."""
    return np.argsort(-values, kind="stable")


def log_softmax(logits: F32) -> F64:
    """[V] float64, with block-wise sums."""
    shifted: F64 = logits.astype(np.float64) - np.float64(logits.max())
    shifted -= np.log(block_sum(np.exp(shifted)))
    return shifted


def block_sum(values: F64) -> np.float64:
    """Sum in blocks of SUM_BLOCK columns, blocks in index order."""
    starts = np.arange(0, len(values), SUM_BLOCK)
    return np.float64(np.cumsum(np.add.reduceat(values, starts))[-1])


def _signals(logits: F32, logprobs: F64, token: int, allowed: Bool | None) -> tuple[float, float, float, float]:
    """(logprob of the token, entropy in nats, largest minus second logit, mass that the mask removes), all raw."""
    probabilities = np.exp(logprobs)
    finite = probabilities > 0
    entropy = -block_sum(np.where(finite, probabilities * np.where(finite, logprobs, 0), 0))
    two = np.partition(logits, len(logits) - 2)[-2:] if len(logits) > 1 else np.array([0, np.inf])
    removed = 0.0 if allowed is None else float(block_sum(np.where(allowed, 0, probabilities)))
    return float(logprobs[token]), float(entropy), float(two[1] - two[0]), removed
