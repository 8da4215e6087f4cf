"""Norms, quantisation, rope, KV writes and softcap against NumPy in float64, on odd shapes."""

import numpy as np
import numpy.typing as npt
import pytest
from paged_cache import Shape, empty_caches, from_bf16, hadamard, read_keys, read_values, to_bf16

from headrace._C import Activations, Kernels

WIDTHS = [1, 31, 32, 96, 576, 1000, 2048]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def rows(count: int, width: int, seed: int = 0) -> F32:
    return (3 * np.random.default_rng(seed).standard_normal((count, width))).astype(np.float32)


def rms_norm(x: F32, gain: F32, eps: float) -> F64:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * gain


def groups(a: npt.NDArray[np.generic], size: int) -> npt.NDArray[np.generic]:
    return a.reshape(len(a), -1, size)


def check_quantised(a: Activations) -> None:
    """q, scale and sum say what f32 says, as exactly as 8 bits can."""
    scale = np.abs(groups(a.f32, 32)).max(2) / np.float32(127)
    np.testing.assert_array_equal(a.scale, scale)
    assert np.abs(a.q.astype(int)).max() <= 127
    error = np.abs(groups(a.q, 32) * a.scale[..., None].astype(np.float64) - groups(a.f32, 32))
    assert (error <= 0.5001 * a.scale[..., None]).all()
    np.testing.assert_array_equal(a.sum, groups(a.q, 16).astype(int).sum(2))


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_quant_normalises_and_quantises(kernels: Kernels, width: int) -> None:
    x, gain = rows(5, width), rows(1, width, seed=1)[0]
    x[1] = 0
    a = kernels.norm_quant(x, gain, eps=1e-5)
    expected = rms_norm(x, gain, 1e-5)
    np.testing.assert_allclose(a.f32[:, :width], expected, rtol=2e-6, atol=1e-7)
    assert not a.f32[:, width:].any()
    check_quantised(a)


@pytest.mark.parametrize("width", WIDTHS)
def test_without_gain_it_only_quantises(kernels: Kernels, width: int) -> None:
    x = rows(3, width)
    a = kernels.norm_quant(x, None)
    np.testing.assert_array_equal(a.f32[:, :width], x)
    check_quantised(a)


def test_rounding_is_to_nearest_even(kernels: Kernels) -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :7] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]
    assert kernels.norm_quant(x, None).q[0, :7].tolist() == [127, 0, 2, 2, 0, -2, 126]


def test_tiny_groups_become_zero(kernels: Kernels) -> None:
    a = kernels.norm_quant(np.full((1, 32), 1e-38, np.float32), None)
    assert not a.q.any()
    assert not a.sum.any()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_marks_its_row_only(kernels: Kernels, bad: float) -> None:
    x = rows(2, 96)
    clean = kernels.norm_quant(x, None)
    x[1, 40] = bad
    a = kernels.norm_quant(x, None)
    assert np.isnan(a.scale).tolist() == [[False, False, False], [False, True, False]]
    keep = ~np.isnan(a.scale)
    np.testing.assert_array_equal(groups(a.q, 32)[keep], groups(clean.q, 32)[keep])
    normed = kernels.norm_quant(x, np.ones(96, np.float32))
    assert np.isnan(normed.scale[1]).any()
    assert np.isfinite(normed.scale[0]).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_does_not_depend_on_its_neighbours(kernels: Kernels, width: int) -> None:
    x, gain = rows(9, width), rows(1, width, seed=1)[0]
    together = kernels.norm_quant(x, gain)
    for i in range(9):
        alone = kernels.norm_quant(x[i : i + 1].copy(), gain)
        np.testing.assert_array_equal(alone.f32[0].view(np.uint32), together.f32[i].view(np.uint32))
        np.testing.assert_array_equal(alone.q[0], together.q[i])


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_rows(kernels: Kernels, width: int) -> None:
    x, gain, out = rows(4, width), rows(1, width, seed=1)[0], rows(4, width, seed=2)
    expected = rms_norm(x, gain, 1e-6)
    added = out.copy()
    kernels.norm_rows(x, gain, 1e-6, added, add=True)
    np.testing.assert_allclose(added, out + expected, rtol=2e-6, atol=2e-6)
    kernels.norm_rows(x, gain, 1e-6, x)
    np.testing.assert_allclose(x, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("with_gain", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (96, 96), (256, 256), (16, 16)])
def test_head_norm_rope(kernels: Kernels, head_dim: int, rotary_dim: int, with_gain: bool) -> None:
    heads, width = 3, 3 * head_dim + 5
    x = rows(4, width)
    angle = rows(4, rotary_dim // 2, seed=1).astype(np.float64)
    gain = rows(1, head_dim, seed=2)[0] if with_gain else None
    before = x[:, : heads * head_dim].reshape(4, heads, head_dim).copy()
    table = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
    normed = before.astype(np.float64) if gain is None else rms_norm(before, gain, 1e-6)
    half = rotary_dim // 2
    low, high = normed[..., :half].copy(), normed[..., half:rotary_dim].copy()
    cosine, sine = np.cos(angle)[:, None], np.sin(angle)[:, None]
    normed[..., :half] = low * cosine - high * sine
    normed[..., half:rotary_dim] = high * cosine + low * sine
    tail = x[:, heads * head_dim :].copy()
    kernels.head_norm_rope(x, heads, head_dim, gain, 1e-6, rotary_dim, table)
    np.testing.assert_allclose(x[:, : heads * head_dim].reshape(before.shape), normed, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(x[:, heads * head_dim :], tail)


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 32), (80, 16), (256, 32)])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_kv_write_places_and_rounds(kernels: Kernels, head_dim: int, block_size: int, dtype: str) -> None:
    heads = 2
    shape = Shape((), (), kv_heads=heads, head_dim=head_dim, block_size=block_size, filler=0x1234, dtype=dtype)
    k, v = rows(3, heads * head_dim), rows(3, heads * head_dim, seed=1)
    v[0, :head_dim] = 0
    slots = np.array([3 * block_size + 5, 0, 2 * block_size - 1], np.int32)
    k_cache, v_cache = empty_caches(4, shape)
    others = np.delete(np.arange(4 * block_size), slots)
    before = read_keys(k_cache, shape, others), read_values(v_cache, shape, others)
    kernels.kv_write(k, v, k_cache, v_cache, slots, head_dim, block_size, dtype)
    written = read_keys(k_cache, shape, slots), read_values(v_cache, shape, slots)
    for x, got in zip((k, v), written, strict=True):
        wide = x.reshape(3, heads, head_dim)
        if dtype == "bf16":
            np.testing.assert_array_equal(got, from_bf16(to_bf16(wide)))
        else:
            turn = hadamard(head_dim) if x is k else np.eye(head_dim)  # of K it is the turned inputs that are rounded
            half_step = 0.501 / 127 * np.abs(wide @ turn).max(-1, keepdims=True)
            assert (np.abs((got - wide) @ turn) <= half_step).all()
    np.testing.assert_array_equal(read_keys(k_cache, shape, others), before[0])
    np.testing.assert_array_equal(read_values(v_cache, shape, others), before[1])


def test_kv_write_rounds_to_even_and_keeps_what_is_not_finite(kernels: Kernels) -> None:
    shape = Shape((), (), kv_heads=1, head_dim=16)
    k = rows(1, 16)
    k[0, :4] = [1 + 2**-8, 1 + 3 * 2**-8, np.inf, np.nan]  # two ties, to even down and up
    k_cache, v_cache = empty_caches(1, shape)
    slots = np.array([7], np.int32)
    kernels.kv_write(k, k, k_cache, v_cache, slots, 16, 32)
    for read, cache in ((read_keys, k_cache), (read_values, v_cache)):
        np.testing.assert_array_equal(read(cache, shape, slots)[0, 0, :4], [1, 1 + 2**-6, np.inf, np.nan])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_int8_token_that_is_not_finite_is_nan_and_no_other(kernels: Kernels, bad: float) -> None:
    shape = Shape((), (), kv_heads=2, head_dim=32, dtype="int8")
    k, v = rows(4, 64), rows(4, 64, seed=1)
    k[1, 5] = v[2, 40] = bad  # token 1, head 0; token 2, head 1
    k_cache, v_cache = empty_caches(1, shape)
    slots = np.arange(4, dtype=np.int32)
    kernels.kv_write(k, v, k_cache, v_cache, slots, 32, 32, "int8")
    keys, values = read_keys(k_cache, shape, slots), read_values(v_cache, shape, slots)
    assert np.argwhere(np.isnan(keys).all(-1)).tolist() == [[1, 0]]
    assert np.argwhere(np.isnan(values).all(-1)).tolist() == [[2, 1]]
    assert np.isnan(keys).sum() == np.isnan(values).sum() == 32


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_kv_write_of_tokens_together_is_that_of_each(kernels: Kernels, dtype: str) -> None:
    """Neighbours share words of the cache: those that are whole, cut, out of order or in other blocks."""
    shape = Shape((), (), kv_heads=2, head_dim=80, block_size=16, filler=0, dtype=dtype)
    slots = np.array([5, 6, 7, 8, 9, 10, 11, 31, 32, 33, 34, 35, 3, 2, 40, 42, 41, 20], np.int32)
    k, v = (rows(len(slots), 160, seed) for seed in range(2))
    together, apart = empty_caches(3, shape), empty_caches(3, shape)
    kernels.kv_write(k, v, *together, slots, 80, 16, dtype)
    for i in range(len(slots)):
        kernels.kv_write(k[i : i + 1], v[i : i + 1], *apart, slots[i : i + 1], 80, 16, dtype)
    np.testing.assert_array_equal(together[0], apart[0])
    np.testing.assert_array_equal(together[1], apart[1])


def test_softcap(kernels: Kernels) -> None:
    x = np.concatenate([np.linspace(-400, 400, 1003), [0, np.inf, -np.inf, np.nan]]).astype(np.float32)
    expected = 30 * np.tanh(x.astype(np.float64) / 30)
    kernels.softcap(x, 30.0)
    np.testing.assert_allclose(x, expected, rtol=0, atol=1e-5)
