"""The native sampler against the NumPy one, on random rows of every kind, and where the two must not differ at all."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from headrace._C import Kernels
from headrace.backend.sampling import SampledRows, sample_batch
from headrace.core.batch import F32, I32, Batch, OutputFlag, SamplingRows
from headrace.core.batch_builder import ScheduledSequence, build_batch
from headrace.core.request import Request, SamplingParams

VOCABS = [(1, 1.0), (7, 1.0), (33, 3.0), (1000, 2.0), (1024, 1.0), (1025, 0.01), (5000, 4.0), (49152, 3.0)]


def random_csr(rng: np.random.Generator, rows: int, vocab: int, most: int) -> tuple[I32, I32]:
    """For every row none, a few or many distinct ids."""
    ids = [rng.choice(vocab, min(vocab, int(rng.choice([0, 3, most]))), replace=False) for _ in range(rows)]
    return np.cumsum([0, *map(len, ids)]).astype(np.int32), np.concatenate(ids).astype(np.int32)


def greedy_rows(rng: np.random.Generator, rows: int, vocab: int) -> SamplingRows:
    def full(value: float) -> F32:
        return np.full(rows, value, np.float32)

    none, empty = np.zeros(rows + 1, np.int32), np.zeros(0, np.int32)
    return SamplingRows(
        temperature=full(0),
        top_k=np.zeros(rows, np.int32),
        top_p=full(1),
        min_p=full(0),
        repetition_penalty=full(1),
        presence_penalty=full(0),
        frequency_penalty=full(0),
        seed=rng.integers(0, 2**64, rows, dtype=np.uint64),
        choice=rng.integers(0, 4, rows).astype(np.int32),
        position=rng.integers(0, 9999, rows).astype(np.int32),
        num_logprobs=rng.integers(-1, min(21, vocab + 1), rows).astype(np.int32),
        bias_cu=none,
        bias_ids=empty,
        bias_values=np.zeros(0, np.float32),
        penalty_cu=none,
        penalty_ids=empty,
        penalty_counts=empty,
    )


def random_rows(rng: np.random.Generator, rows: int, vocab: int) -> SamplingRows:
    def pick(*values: float) -> F32:
        return rng.choice(values, rows).astype(np.float32)

    bias_cu, bias_ids = random_csr(rng, rows, vocab, 20)
    penalty_cu, penalty_ids = random_csr(rng, rows, vocab, 200)
    return replace(
        greedy_rows(rng, rows, vocab),
        temperature=pick(0, 0.2, 0.7, 1, 1.5, 5),
        top_k=pick(0, 1, 5, 40, vocab, vocab // 2).astype(np.int32),
        top_p=pick(1, 0.95, 0.5, 0.999, 0),
        min_p=pick(0, 0, 0.05, 1),
        repetition_penalty=pick(1, 1.3),
        presence_penalty=pick(0, 0.7),
        frequency_penalty=pick(0, -0.4, 0.3),
        bias_cu=bias_cu,
        bias_ids=bias_ids,
        bias_values=rng.choice([-np.inf, 5, -3, 100], len(bias_ids)).astype(np.float32),
        penalty_cu=penalty_cu,
        penalty_ids=penalty_ids,
        penalty_counts=rng.integers(0, 4, len(penalty_ids)).astype(np.int32),
    )


def batch_of(sampling: SamplingRows, vocab: int) -> Batch:
    """A batch of one-token sequences whose rows sample so."""
    rows = len(sampling.seed)
    table = (np.zeros(1, np.int32),)
    request = Request("r", [0], SamplingParams(), 0)
    batch = build_batch(0, [ScheduledSequence(request, 0, 1, table) for _ in range(rows)], 1, [], vocab)
    return replace(batch, sampling=sampling)


def random_masks(rng: np.random.Generator, vocab: int) -> I32:
    """Three masks: half, little and most of the vocabulary is allowed."""
    bits = np.zeros((3, -(-vocab // 32) * 32), np.uint8)
    bits[:, :vocab] = rng.random((3, vocab)) < np.array([[0.5], [0.02], [0.98]])
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def random_logits(rng: np.random.Generator, rows: int, vocab: int, spread: float) -> F32:
    logits = (rng.standard_normal((rows, vocab)) * spread).astype(np.float32)
    logits[::3] = np.round(logits[::3])  # many ties
    logits[1, vocab // 2] = np.nan
    logits[2, : vocab - 1] = -np.inf
    logits[3, 0] = np.inf
    logits[4] = -np.inf
    return logits


def sample(kernels: Kernels, logits: F32, batch: Batch) -> SampledRows:
    k = max(0, int(batch.sampling.num_logprobs.max()))
    ids, logprobs, top_ids, signals, status = kernels.sample(logits, batch, k)
    return SampledRows(ids, logprobs, top_ids, signals, status)


def check(actual: SampledRows, expected: SampledRows) -> None:
    np.testing.assert_array_equal(actual.status, expected.status)
    failed = expected.status != 0
    np.testing.assert_array_equal(actual.token_ids, np.where(failed, 0, expected.token_ids))
    np.testing.assert_array_equal(actual.top_ids, expected.top_ids)
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=2e-7, atol=3e-6)
    np.testing.assert_allclose(actual.signals, expected.signals, rtol=2e-7, atol=1e-5)


@pytest.mark.parametrize(("vocab", "spread"), VOCABS)
def test_greedy_rows_agree_with_numpy(kernels: Kernels, vocab: int, spread: float) -> None:
    rng = np.random.default_rng(vocab)
    rows = 12
    batch = batch_of(greedy_rows(rng, rows, vocab), vocab)
    logits = random_logits(rng, rows, vocab, spread)
    check(sample(kernels, logits, batch), sample_batch(logits, batch))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("vocab", "spread"), VOCABS)
def test_rows_with_everything_agree_with_numpy(kernels: Kernels, vocab: int, spread: float, seed: int) -> None:
    rng = np.random.default_rng([seed, vocab])
    rows = 32 if vocab < 40000 else 12
    batch = batch_of(random_rows(rng, rows, vocab), vocab)
    flags = rng.choice([OutputFlag.SAMPLE, OutputFlag.SAMPLE | OutputFlag.LOGPROBS, OutputFlag.PROMPT_LOGPROBS], rows)
    targets = np.where(flags == OutputFlag.PROMPT_LOGPROBS, rng.integers(0, vocab, rows), -1)
    batch = replace(
        batch,
        output_flags=flags.astype(np.uint8),
        target_ids=targets.astype(np.int32),
        mask_row=rng.choice([-1, 0, 1, 2], rows).astype(np.int32),
        mask_bits=random_masks(rng, vocab),
    )
    logits = random_logits(rng, rows, vocab, spread)
    with np.errstate(invalid="ignore"):
        expected = sample_batch(logits, batch)
    check(sample(kernels, logits, batch), expected)


def one_row(**changes: float) -> SamplingRows:
    rng = np.random.default_rng(0)
    rows = greedy_rows(rng, 1, 2)
    arrays = {name: np.array([value], getattr(rows, name).dtype) for name, value in changes.items()}
    return replace(rows, **arrays)


def kept_ids(kernels: Kernels, logits: list[float], **changes: float) -> set[int]:
    """Ids that 300 seeds draw."""
    rows = one_row(temperature=1.0, **changes)
    many = {
        name: np.repeat(getattr(rows, name), 300) for name in rows.__dataclass_fields__ if len(getattr(rows, name)) == 1
    }
    many["seed"] = np.arange(300, dtype=np.uint64)
    many["bias_cu"] = many["penalty_cu"] = np.zeros(301, np.int32)
    batch = batch_of(replace(rows, **many), len(logits))
    return set(sample(kernels, np.tile(np.array(logits, np.float32), (300, 1)), batch).token_ids.tolist())


def test_top_k_breaks_ties_by_id(kernels: Kernels) -> None:
    assert kept_ids(kernels, [1, 2, 2, 0, 2, 1], top_k=2) == {1, 2}
    assert kept_ids(kernels, [-0.0, 0.0, -0.0, -9.0], top_k=2) == {0, 1}


def test_top_p_keeps_the_id_that_reaches_it(kernels: Kernels) -> None:
    logits = np.log([0.1, 0.4, 0.2, 0.3]).tolist()
    assert kept_ids(kernels, logits, top_p=0.39) == {1}
    assert kept_ids(kernels, logits, top_p=0.41) == {1, 3}
    assert kept_ids(kernels, logits, top_p=0.85) == {1, 2, 3}
    assert kept_ids(kernels, [0.0] * 8, top_p=0.5) == {0, 1, 2, 3}
    assert kept_ids(kernels, logits, top_p=0.0) == {1}


def test_top_p_counts_only_what_top_k_left(kernels: Kernels) -> None:
    """0.4 is 57 % of 0.7."""
    logits = np.log([0.1, 0.4, 0.2, 0.3]).tolist()
    assert kept_ids(kernels, logits, top_k=2, top_p=0.55) == {1}
    assert kept_ids(kernels, logits, top_k=2, top_p=0.6) == {1, 3}


def test_min_p_is_relative_to_the_largest(kernels: Kernels) -> None:
    logits = np.log([0.5, 0.3, 0.2]).tolist()
    assert kept_ids(kernels, logits, min_p=0.5) == {0, 1}
    assert kept_ids(kernels, logits, min_p=0.7) == {0}


def test_flat_vocabularies_are_cut_exactly(kernels: Kernels) -> None:
    """No value tells the ids apart: the cut must count them."""
    vocab = 3000
    for k in (1, 1024, 1025, 2999):
        rows = one_row(temperature=1.0, top_k=k)
        tokens = [
            int(
                sample(
                    kernels,
                    np.zeros((1, vocab), np.float32),
                    batch_of(replace(rows, seed=np.array([seed], np.uint64)), vocab),
                ).token_ids[0]
            )
            for seed in range(100)
        ]
        assert max(tokens) < k
        assert k == 1 or max(tokens) > 0.9 * k


def test_a_tiny_temperature_is_greedy(kernels: Kernels) -> None:
    logits = np.array([[-20.0, 30.0, 29.9]], np.float32)
    for temperature in (1e-3, 1e-38, 1e-45):
        assert sample(kernels, logits, batch_of(one_row(temperature=temperature), 3)).token_ids.tolist() == [1]


def test_the_order_of_logprobs_is_that_of_logits(kernels: Kernels) -> None:
    rng = np.random.default_rng(3)
    logits = np.round(rng.standard_normal((1, 2000)) * 2).astype(np.float32)
    result = sample(kernels, logits, batch_of(one_row(num_logprobs=20), 2000))
    ids = result.top_ids[0].tolist()
    keys = [(-logits[0, i], i) for i in ids]
    assert all(a < b for a, b in pairwise(keys))
    assert keys == sorted((-x, i) for i, x in enumerate(logits[0].tolist()))[:20]


def test_logits_are_not_modified(kernels: Kernels) -> None:
    rng = np.random.default_rng(5)
    logits: npt.NDArray[np.float32] = rng.standard_normal((12, 500)).astype(np.float32)
    before = logits.copy()
    sample(kernels, logits, batch_of(random_rows(rng, 12, 500), 500))
    np.testing.assert_array_equal(logits, before)
