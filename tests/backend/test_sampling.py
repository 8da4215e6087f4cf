"""The NumPy sampler: Philox against published vectors, each step of the recipe, and the distribution it draws from."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backend.philox import philox4x32, uniform
from headrace.backend.sampling import SUM_BLOCK, SampledRows, block_sum, log_softmax, sample_batch
from headrace.core.batch import Batch, OutputFlag, RowStatus
from headrace.core.batch_builder import ScheduledSequence, build_batch
from headrace.core.penalties import PenaltyHistory
from headrace.core.request import Request, SamplingParams


def batch_of(*requests: Request, vocab: int) -> Batch:
    items = []
    for request in requests:
        table = (np.arange(request.num_tokens, dtype=np.int32),)
        first_row = 1 << 30 if request.params.prompt_logprobs is None else 0
        items.append(
            ScheduledSequence(request, 0, request.num_tokens, table, first_row, history=PenaltyHistory(request))
        )
    return build_batch(0, items, 1, [], vocab)


def sample(
    logits: Any, output: tuple[int, ...] = (), prompt: tuple[int, ...] = (0,), mask: Any = None, **params: Any
) -> SampledRows:
    """One row through the sampler, for a request with this history."""
    import dataclasses

    row = np.array([logits], np.float32)
    request = Request("r", list(prompt), SamplingParams(**params), 0, output_token_ids=list(output))
    batch = batch_of(request, vocab=row.shape[1])
    if mask is not None:
        bits = np.zeros(-(-row.shape[1] // 32) * 32, np.uint8)
        bits[list(mask)] = 1
        words = np.packbits(bits, bitorder="little").view(np.int32)[np.newaxis]
        batch = dataclasses.replace(batch, mask_bits=words, mask_row=np.zeros(1, np.int32))
    return sample_batch(row, batch)


def greedy(logits: Any, **more: Any) -> int:
    return int(sample(logits, temperature=0.0, **more).token_ids[0])


def drawn(logits: Any, count: int = 400, **params: Any) -> Counter[int]:
    """Tokens of `count` rows that differ only in their seed."""
    requests = [Request("r", [0], SamplingParams(seed=seed, **params), 0) for seed in range(count)]
    rows = np.tile(np.array(logits, np.float32), (count, 1))
    return Counter(sample_batch(rows, batch_of(*requests, vocab=len(logits))).token_ids.tolist())


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter: Any, key: Any, expected: Any) -> None:
    """Known answers for philox4x32-10 that its authors publish with Random123."""
    assert philox4x32(counter, key) == expected


def test_uniform_uses_every_part_of_its_key_and_counter() -> None:
    base = uniform(1, 0, 0)
    assert base == uniform(1, 0, 0)
    assert len({base, uniform(1 | 1 << 32, 0, 0), uniform(2, 0, 0), uniform(1, 1, 0), uniform(1, 0, 1)}) == 5


def test_uniform_is_uniform() -> None:
    """Ten bins of 10,000 draws: the largest deviation of a fixed stream, far inside chance (5 sigma is 150)."""
    bins = Counter(int(uniform(9, 0, position) * 10) for position in range(10_000))
    assert set(bins) == set(range(10))
    assert max(abs(count - 1000) for count in bins.values()) < 150


def test_greedy_takes_the_largest_and_ties_go_to_the_lowest_id() -> None:
    assert greedy([1.0, 3.0, 3.0, 2.0]) == 1


def test_top_k_breaks_ties_by_id() -> None:
    assert set(drawn([2.0, 2.0, 2.0, 2.0], top_k=2)) == {0, 1}


def test_top_k_one_is_greedy() -> None:
    assert set(drawn([0.1, 0.2, 0.0], count=50, top_k=1)) == {1}


def test_top_p_keeps_the_smallest_prefix_that_reaches_it() -> None:
    """Shares 0.5, 0.25, 0.25: 0.5 needs one id, 0.6 two, and of the equal ones the lower id."""
    logits = np.log([0.25, 0.5, 0.25])
    assert set(drawn(logits, top_p=0.5, count=100)) == {1}
    assert set(drawn(logits, top_p=0.6)) == {0, 1}
    assert set(drawn(logits, top_p=0.0, count=50)) == {1}


def test_top_p_counts_on_what_top_k_left() -> None:
    """After top_k = 2 the shares are 2/3 and 1/3, so top_p = 0.6 keeps one; on all three it would keep two."""
    logits = np.log([0.5, 0.25, 0.25])
    assert set(drawn(logits, top_p=0.6, count=100, top_k=2)) == {0}


def test_min_p_is_relative_to_the_largest() -> None:
    logits = np.log([0.6, 0.3, 0.1])
    assert set(drawn(logits, min_p=0.4)) == {0, 1}
    assert set(drawn(logits, min_p=0.6, count=100)) == {0}


def test_min_p_acts_after_temperature() -> None:
    """At temperature 2 a share of 1/16 of the largest becomes 1/4."""
    assert set(drawn(np.log([16.0, 1.0]), min_p=0.2, temperature=2.0)) == {0, 1}
    assert set(drawn(np.log([16.0, 1.0]), min_p=0.2, count=100)) == {0}


def test_the_draw_follows_the_probabilities() -> None:
    """Chi-square of 4,000 fixed draws over 4 ids; 16.3 is the 0.1 % point for 3 degrees of freedom."""
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    counts = drawn(np.log(shares), count=4000)
    expected = shares * 4000
    assert sum((counts[i] - expected[i]) ** 2 / expected[i] for i in range(4)) < 16.3


def test_temperature_flattens() -> None:
    logits = np.log([0.9, 0.1])
    cold, hot = drawn(logits, temperature=0.5), drawn(logits, temperature=4.0)
    assert cold[1] < 20 < 100 < hot[1]


def test_bias_is_added_and_minus_infinity_forbids() -> None:
    assert greedy([1.0, 2.0, 3.0], logit_bias=((0, 5.0),)) == 0
    assert greedy([1.0, 2.0, 3.0], min_tokens=1, stop_token_ids=(2,)) == 1


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    assert greedy([2.0, 1.5, -9.0], prompt=(0,), repetition_penalty=2.0) == 1
    assert greedy([2.0, 1.5, -9.0], prompt=(2,), output=(0,), repetition_penalty=2.0) == 1
    assert greedy([-1.0, -1.5, -9.0], prompt=(0,), repetition_penalty=2.0) == 1


def test_presence_and_frequency_count_the_output_only() -> None:
    assert greedy([2.0, 1.5], prompt=(0, 0), presence_penalty=1.0, frequency_penalty=1.0) == 0
    assert greedy([2.0, 1.5], prompt=(1,), output=(0,), presence_penalty=1.0) == 1
    assert greedy([2.0, 1.5], prompt=(1,), output=(0,), frequency_penalty=0.4) == 0
    assert greedy([2.0, 1.5], prompt=(1,), output=(0, 0), frequency_penalty=0.4) == 1


def test_bias_comes_before_the_repetition_penalty() -> None:
    """(1 + 3) / 2 = 2 loses against 3; 1 / 2 + 3 would win."""
    assert greedy([1.0, 3.0], prompt=(0,), logit_bias=((0, 3.0),), repetition_penalty=2.0) == 1


def test_a_mask_forbids_and_the_mass_it_removes_is_reported() -> None:
    result = sample(np.log([0.5, 0.3, 0.2]), mask={1}, temperature=0.0)
    assert result.token_ids.tolist() == [1]
    assert result.signals[0, 3] == pytest.approx(0.7)


def test_a_mask_reaches_beyond_its_first_word() -> None:
    logits = np.zeros(70)
    logits[3] = 9
    assert greedy(logits, mask={33, 69}) == 33


def test_logprobs_are_raw_whatever_was_asked_of_the_choice() -> None:
    shares = np.array([0.5, 0.3, 0.2])
    result = sample(np.log(shares), temperature=0.0, logit_bias=((2, 9.0),), logprobs=2)
    assert result.token_ids.tolist() == [2]
    assert np.exp(result.logprobs[0]) == pytest.approx([0.2, 0.5, 0.3])
    assert result.top_ids.tolist() == [[0, 1]]


def test_signals_are_logprob_entropy_margin_and_mass() -> None:
    result = sample(np.log([0.5, 0.25, 0.25]), temperature=0.0)
    entropy = 0.5 * np.log(2) + 0.5 * np.log(4)
    assert result.signals[0].tolist() == pytest.approx([np.log(0.5), entropy, np.log(2), 0.0])


def test_a_prompt_logprob_row_reports_its_target_and_samples_nothing() -> None:
    request = Request("r", [0, 2, 1], SamplingParams(prompt_logprobs=1, temperature=0.0), 0)
    batch = batch_of(request, vocab=3)
    shares = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]])
    result = sample_batch(np.log(shares).astype(np.float32), batch)
    assert result.token_ids.tolist() == [-1, -1, 0]
    assert np.exp(result.logprobs[:2, 0]) == pytest.approx([0.2, 0.2])
    assert result.top_ids.tolist() == [[0], [2], [-1]]
    assert np.isnan(result.logprobs[2]).all()
    assert batch.output_flags.tolist() == [OutputFlag.PROMPT_LOGPROBS] * 2 + [OutputFlag.SAMPLE]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_logits_fail_their_row(bad: float) -> None:
    result = sample([1.0, bad, 2.0])
    assert result.status.tolist() == [RowStatus.NON_FINITE]
    assert result.token_ids.tolist() == [-1]


def test_a_row_where_nothing_is_left_fails() -> None:
    assert sample([1.0, 2.0], mask=set()).status.tolist() == [RowStatus.NON_FINITE]
    assert sample([-np.inf, -np.inf]).status.tolist() == [RowStatus.NON_FINITE]


def test_minus_infinity_is_a_legal_logit() -> None:
    result = sample([-np.inf, 1.0, -np.inf], logprobs=3, seed=4)
    assert result.status.tolist() == [RowStatus.OK]
    assert result.token_ids.tolist() == [1]
    assert result.signals[0].tolist() == [0.0, 0.0, np.inf, 0.0]


def test_rows_do_not_see_each_other() -> None:
    """A row gives the same in a batch as alone, next to a row that fails."""
    requests = [
        Request(f"r{i}", [i, 3], SamplingParams(seed=i, top_p=0.9, repetition_penalty=1.1, logprobs=i), 0)
        for i in range(3)
    ]
    logits = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    logits[1, 5] = np.nan
    together = sample_batch(logits, batch_of(*requests, vocab=40))
    assert together.status.tolist() == [0, RowStatus.NON_FINITE, 0]
    for i in (0, 2):
        alone = sample_batch(logits[i : i + 1], batch_of(requests[i], vocab=40))
        assert alone.token_ids[0] == together.token_ids[i]
        assert np.array_equal(alone.logprobs[0], together.logprobs[i, : 1 + i])
        assert np.array_equal(alone.signals[0], together.signals[i])


def test_a_batch_without_rows_gives_nothing() -> None:
    request = Request("r", [1, 2, 3], SamplingParams(), 0)
    item = ScheduledSequence(request, 0, 2, (np.arange(2, dtype=np.int32),))
    result = sample_batch(np.empty((0, 9), np.float32), build_batch(0, [item], 1, [], 9))
    assert result.token_ids.shape == (0,)
    assert result.logprobs.shape == (0, 1)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), vocab=st.integers(1, 2 * SUM_BLOCK + 5))
def test_whatever_is_asked_the_token_survives_every_filter(data: st.DataObject, vocab: int) -> None:
    """Against a plain restatement of the filters on sorted lists."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = np.round(rng.normal(size=vocab) * 3).astype(np.float32)  # many ties
    top_k = data.draw(st.sampled_from([0, 1, 3, vocab, vocab + 9]))
    top_p = data.draw(st.sampled_from([1.0, 0.9, 0.3, 0.0]))
    min_p = data.draw(st.sampled_from([0.0, 0.05, 1.0]))
    token = int(sample(logits, top_k=top_k, top_p=top_p, min_p=min_p, seed=vocab).token_ids[0])
    ranked = sorted(range(vocab), key=lambda i: (-logits[i], i))
    ranked = [i for i in ranked if min_p == 0 or logits[i] >= logits.max() + np.log(np.float32(min_p))]
    ranked = ranked[:top_k] if top_k else ranked
    weights = np.exp(logits[ranked].astype(np.float64) - logits.max())
    length = (
        1 + int(np.argmax(np.cumsum(weights) >= np.float32(top_p) * weights.sum() - 1e-9)) if top_p < 1 else len(ranked)
    )
    assert token in ranked[: length + 1]
    assert token in ranked


def test_sums_run_over_fixed_blocks_in_order() -> None:
    values = np.random.default_rng(1).random(3 * SUM_BLOCK + 17)
    total = 0.0
    for start in range(0, len(values), SUM_BLOCK):
        total += np.add.reduce(values[start : start + SUM_BLOCK])
    assert block_sum(values) == pytest.approx(total, rel=1e-15)
    assert np.exp(log_softmax(values.astype(np.float32))).sum() == pytest.approx(1.0)
