"""Paged attention: right against float64, and the same bits however the work is cut."""

from dataclasses import replace

import numpy as np
import pytest
from paged_cache import F32, PagedCache, Shape

from headrace._C import Kernels

SHAPES = {
    "gqa3": Shape((1, 33, 257, 600), (1, 33, 9, 40)),
    "mha_d80_block16": Shape((31, 300), (31, 70), heads=4, kv_heads=4, head_dim=80, block_size=16),
    "gqa2": Shape((64, 290), (3, 1), heads=4, kv_heads=2, head_dim=64),
    "gqa4_window": Shape((530,), (50,), heads=8, kv_heads=2, head_dim=96, window=100),
    "gqa8_softcap": Shape((255, 511), (5, 3), heads=8, kv_heads=1, head_dim=128, block_size=16, softcap=5.0),
    "d256_window": Shape((770,), (5,), heads=4, kv_heads=1, head_dim=256, window=512),
    "small_window": Shape((300,), (20,), heads=2, kv_heads=1, head_dim=16, window=7),
    "long": Shape((1023, 2049, 8192), (1, 2, 1), heads=4, kv_heads=1),
    "long_window": Shape((4097, 8191), (1, 1), heads=2, kv_heads=1, block_size=16, window=1000),
}
SHAPES |= {f"{name}_int8": replace(shape, dtype="int8") for name, shape in SHAPES.items()}
DTYPES = ["bf16", "int8"]
CUTS = [(1, 0), (3, 0), (16, 0), (100, 0), (1, 1), (8, 1), (5, 2)]  # (tokens an item, partitions an item)


def same_bits(a: F32, b: F32) -> bool:
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def tolerance(kernels: Kernels, dtype: str = "bf16") -> float:
    """Over int8 caches weights have 16 bits, and a tie of q may go either way; else bf16 on AVX-512, f32 elsewhere."""
    if dtype == "int8":
        return 2e-3
    return 1.5e-2 if kernels.name.startswith("avx512") else 2e-6


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_agrees_with_float64(kernels: Kernels, shape: Shape) -> None:
    cache = PagedCache(shape)
    np.testing.assert_allclose(cache.attend(kernels), cache.exact(), rtol=0, atol=tolerance(kernels, shape.dtype))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_no_cut_of_the_work_changes_a_bit(kernels: Kernels, shape: Shape) -> None:
    cache = PagedCache(shape)
    whole = cache.attend(kernels)
    for tokens, split in CUTS:
        assert same_bits(cache.attend(kernels, tokens, split), whole), (tokens, split)


@pytest.mark.parametrize("name", ["gqa3", "gqa3_int8"])
def test_moving_the_partition_boundaries_changes_bits(kernels: Kernels, name: str) -> None:
    """The property above can fail: the partition length is part of the result."""
    cache = PagedCache(SHAPES[name])
    assert not same_bits(cache.attend(kernels, partition=128), cache.attend(kernels))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 255, 256, 257])
def test_a_token_decoded_alone_equals_it_in_a_prompt(kernels: Kernels, length: int, dtype: str) -> None:
    prompt = PagedCache(Shape((length,), (length,), dtype=dtype))
    whole = prompt.attend(kernels, tokens=32)
    alone = PagedCache(Shape((length,), (1,), dtype=dtype))
    alone.q = prompt.q[-1:].copy()
    assert same_bits(alone.attend(kernels), whole[-1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_in_a_batch_equals_it_alone(kernels: Kernels, dtype: str) -> None:
    batch = PagedCache(Shape((40, 300, 77), (3, 5, 1), dtype=dtype))
    together = batch.attend(kernels)
    for seq in range(3):
        alone = PagedCache(Shape((batch.shape.seq_lens[seq],), (batch.shape.q_lens[seq],), dtype=dtype))
        alone.k_cache, alone.v_cache = batch.k_cache, batch.v_cache
        alone.block_table = np.ascontiguousarray(batch.block_table[seq : seq + 1])
        rows = slice(batch.cu_seqlens_q[seq], batch.cu_seqlens_q[seq + 1])
        alone.q = batch.q[rows].copy()
        assert same_bits(alone.attend(kernels), together[rows])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_what_a_former_owner_left_does_not_matter(kernels: Kernels, shape: Shape) -> None:
    """The pool around the tokens is NaN, or infinite, or zero."""
    nan = PagedCache(shape).attend(kernels)
    for filler in (0, 0x7F80, 0xFF80):
        assert same_bits(PagedCache(replace(shape, filler=filler)).attend(kernels), nan)


@pytest.mark.parametrize("freed", [True, False])
@pytest.mark.parametrize("name", ["gqa4_window", "gqa4_window_int8"])
def test_blocks_that_left_the_window_are_not_looked_at(kernels: Kernels, freed: bool, name: str) -> None:
    """Their entries are -1, or name a block that now belongs to somebody else."""
    shape = SHAPES[name]
    cache = PagedCache(shape)
    before = cache.attend(kernels)
    first_needed = (shape.seq_lens[0] - shape.q_lens[0] + 1 - shape.window) // shape.block_size
    assert first_needed > 2
    foreign = next(block for block in range(len(cache.k_cache)) if block not in cache.block_table)
    cache.block_table[0, :first_needed] = -1 if freed else foreign
    assert same_bits(cache.attend(kernels), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_an_edge_block_that_left_the_window_are_not_numbers(kernels: Kernels, dtype: str) -> None:
    """The block that the window cuts stays, its first tokens may be anything."""
    shape = Shape((300,), (1,), window=101, dtype=dtype)  # sees [199, 300): 199 is the 7th token of its block
    cache = PagedCache(shape)
    before = cache.attend(kernels)
    for position in range(192, 199):
        cache.spoil("key", 0, position)
        cache.spoil("value", 0, position)
    assert same_bits(cache.attend(kernels), before)


@pytest.mark.parametrize("name", ["gqa3", "gqa3_int8"])
def test_a_query_that_is_not_finite_fails_alone(kernels: Kernels, name: str) -> None:
    cache = PagedCache(SHAPES[name])
    before = cache.attend(kernels).reshape(-1, 9, 64)
    cache.q[5, 64 * 4] = np.nan
    after = cache.attend(kernels).reshape(-1, 9, 64)
    assert np.isnan(after[5, 4]).all()
    after[5, 4] = before[5, 4]
    assert same_bits(after, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["key", "value"])
def test_a_cached_token_that_is_not_finite_fails_the_rows_that_see_it(kernels: Kernels, side: str, dtype: str) -> None:
    cache = PagedCache(Shape((300,), (300,), dtype=dtype))
    before = cache.attend(kernels)
    cache.spoil(side, 0, 280)
    after = cache.attend(kernels, tokens=1)
    assert np.isnan(after[280:]).all()
    assert same_bits(after[:280], before[:280])


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(kernels: Kernels, dtype: str) -> None:
    cache = PagedCache(Shape((290,), (2,), dtype=dtype))
    cache.q *= 300
    assert np.isfinite(cache.attend(kernels)).all()
    if dtype == "bf16" and not kernels.name.startswith("avx512"):
        np.testing.assert_allclose(cache.attend(kernels), cache.exact(), rtol=0, atol=2e-3)


def test_int8_caches_are_the_same_on_every_instruction_set(kernels: Kernels) -> None:
    """Sums of whole numbers: only the exponential and the sums of its weights can differ."""
    cache = PagedCache(SHAPES["d256_window_int8"])
    np.testing.assert_allclose(cache.attend(kernels), cache.attend(Kernels("reference")), rtol=0, atol=1e-4)


def test_a_token_of_zeros_and_one_that_outweighs_all_are_exact_in_int8(kernels: Kernels) -> None:
    """A zero has no scale. A large V makes the others' whole weights small, and the weight of a huge one is the row."""
    cache = PagedCache(Shape((257,), (1,), dtype="int8"))
    values = np.zeros((257, 3, 64), np.float32)
    values[100] = 1e6
    keys = np.zeros_like(values)
    form = (64, 32, "int8")
    kernels.kv_write(keys, values, cache.k_cache, cache.v_cache, cache.slots(0, 257), *form)
    np.testing.assert_allclose(cache.attend(kernels), 1e6 / 257, rtol=1e-4)
