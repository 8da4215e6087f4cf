"""Packing, GEMM and embedding against NumPy in float64 and the gguf package, on odd shapes and at the extremes."""

import numpy as np
import numpy.typing as npt
import pytest
from raw_blocks import FLOATS, QUANTS, block_inputs, extreme_rows, random_rows, type_number, values

from headrace._C import Activations, Kernels, Weight

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

STORE, ADD_TO, SWIGLU, GEGLU = range(4)
ROWS = 100


def widths(name: str) -> list[int]:
    """Inputs to try: odd ones for floats, whole blocks for the rest."""
    if name in FLOATS:
        return [1, 33, 64, 577]
    return [256, 512, 768, 1536] if block_inputs(name) == 256 else [32, 64, 576, 1536]


def inputs(rows: int, k: int, seed: int = 1) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)


def pack(kernels: Kernels, name: str, n: int, k: int, seed: int = 0) -> tuple[Weight, F64]:
    raw = random_rows(name, n, k, seed)
    return kernels.pack(raw, type_number(name), k), values(name, raw).astype(np.float64)


def seen(kernels: Kernels, name: str, a: Activations, k: int) -> F64:
    """The activations that a GEMM with this format multiplies: quantised, f32, or rounded to bf16."""
    if name in QUANTS:
        return (a.q.reshape(len(a.q), -1, 32) * a.scale[..., None].astype(np.float64)).reshape(len(a.q), -1)[:, :k]
    x = np.ascontiguousarray(a.f32[:, :k])
    if name == "BF16" and kernels.name.startswith("avx512"):
        bits = x.view(np.uint32)
        x = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return x.astype(np.float64)


def gemm(kernels: Kernels, w: Weight, a: Activations, n: int, rows: tuple[int, int] = (0, ROWS)) -> F32:
    out = np.full((ROWS, n), np.nan, np.float32)
    kernels.gemm(w, a, out, rows=rows)
    return out[rows[0] : rows[1]]


def assert_close(got: F32, x: F64, w: F64, bound: float = 1e-6) -> None:
    """Within `bound` of the exact product, relative to the sum of the magnitudes that were added."""
    assert np.abs(got - x @ w.T).max() >= 0  # no NaN
    error = np.abs(got - x @ w.T) / (np.abs(x) @ np.abs(w.T) + 1e-30)
    assert error.max() < bound


@pytest.mark.parametrize("name", FLOATS + QUANTS)
def test_product(kernels: Kernels, name: str) -> None:
    for n, k in zip([576, 1, 33, 192], widths(name), strict=True):
        w, exact = pack(kernels, name, n, k)
        a = kernels.norm_quant(inputs(ROWS, k))
        assert_close(gemm(kernels, w, a, n), seen(kernels, name, a, k), exact)


@pytest.mark.parametrize("name", FLOATS + QUANTS)
def test_a_row_has_the_same_bits_in_any_block_of_rows(kernels: Kernels, name: str) -> None:
    k = widths(name)[2]
    w, _ = pack(kernels, name, 33, k)
    a = kernels.norm_quant(inputs(ROWS, k))
    whole = gemm(kernels, w, a, 33)
    for count in [*range(1, 34), 64, 97]:
        for begin in (0, ROWS - count):
            part = gemm(kernels, w, a, 33, rows=(begin, begin + count))
            np.testing.assert_array_equal(part, whole[begin : begin + count])


@pytest.mark.parametrize("name", FLOATS + QUANTS)
def test_a_column_has_the_same_bits_in_any_range_of_panels(kernels: Kernels, name: str) -> None:
    k = widths(name)[-1]
    w, _ = pack(kernels, name, 70, k)
    a = kernels.norm_quant(inputs(5, k))
    whole, parts = np.zeros((2, 5, 70), np.float32)
    kernels.gemm(w, a, whole)
    for panel in range(3):
        kernels.gemm(w, a, parts, panels=(panel, panel + 1))
    np.testing.assert_array_equal(parts, whole)


@pytest.mark.parametrize("fill", [0, 255])
@pytest.mark.parametrize("name", QUANTS)
def test_integer_sums_never_saturate(kernels: Kernels, name: str, fill: int) -> None:
    """Every weight and every activation at the end of its range: the largest sums there are."""
    k = 512
    raw = extreme_rows(name, 33, k, fill)
    w = kernels.pack(raw, type_number(name), k)
    x = np.full((ROWS, k), 127, np.float32)
    x[1::3] = -127
    x[2::3, 1::2] = -127
    a = kernels.norm_quant(x)
    np.testing.assert_array_equal(np.abs(a.q), np.full((ROWS, k), 127))
    for rows in ((0, 1), (0, 3), (0, ROWS)):
        assert_close(
            gemm(kernels, w, a, 33, rows), x[rows[0] : rows[1]].astype(np.float64), values(name, raw).astype(np.float64)
        )


@pytest.mark.parametrize("name", QUANTS)
def test_weights_keep_the_bits_of_the_checkpoint(kernels: Kernels, name: str) -> None:
    """A single activation of 127 steps of size 1 picks out one weight, with one rounding or two on the way."""
    k, n = 256, 40
    w, exact = pack(kernels, name, n, k)
    x = np.zeros((ROWS, k), np.float32)
    picked = np.random.default_rng(3).permutation(k)[:ROWS]
    x[np.arange(ROWS), picked] = 127
    got = gemm(kernels, w, kernels.norm_quant(x), n)
    expected = 127 * exact[:, picked].T
    np.testing.assert_allclose(got, expected, rtol=3e-7, atol=2e-7 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "F32"])
def test_bias_and_residual(kernels: Kernels, name: str) -> None:
    for n in (32, 45):
        w, _ = pack(kernels, name, n, 64)
        a = kernels.norm_quant(inputs(7, 64))
        plain = np.zeros((7, n), np.float32)
        kernels.gemm(w, a, plain)
        bias, before = inputs(1, n, seed=4)[0], inputs(7, n, seed=5)
        out = before.copy()
        kernels.gemm(w, a, out, bias=bias)
        np.testing.assert_array_equal(out, plain + bias)
        out = before.copy()
        kernels.gemm(w, a, out, epilogue=ADD_TO)
        np.testing.assert_array_equal(out, before + plain)
        out = before.copy()
        kernels.gemm(w, a, out, bias=bias, epilogue=ADD_TO)
        np.testing.assert_array_equal(out, before + (plain + bias))


def test_columns_and_rows_outside_the_product_are_left_alone(kernels: Kernels) -> None:
    w, _ = pack(kernels, "Q4_0", 33, 64)
    out = np.full((9, 40), 7, np.float32)
    kernels.gemm(w, kernels.norm_quant(inputs(9, 64)), out, rows=(2, 6))
    assert (out[:, 33:] == 7).all()
    assert (out[:2] == 7).all()
    assert (out[6:] == 7).all()
    assert (out[2:6, :33] != 7).all()


@pytest.mark.parametrize("epilogue", [SWIGLU, GEGLU])
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "BF16"])
def test_gated_layers_interleave_gate_and_up(kernels: Kernels, name: str, epilogue: int) -> None:
    k = 256
    a = kernels.norm_quant(4 * inputs(ROWS, k))
    for n in (16, 40):
        raw, raw_up = random_rows(name, n, k, seed=6), random_rows(name, n, k, seed=7)
        gate = gemm(kernels, kernels.pack(raw, type_number(name), k), a, n).astype(np.float64)
        up = gemm(kernels, kernels.pack(raw_up, type_number(name), k), a, n).astype(np.float64)
        out = np.full((ROWS, n + 1), 7, np.float32)
        kernels.gemm(kernels.pack(raw, type_number(name), k, raw_up), a, out, epilogue=epilogue)
        if epilogue == SWIGLU:
            expected = gate / (1 + np.exp(-np.maximum(gate, -700))) * up
        else:
            expected = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
        np.testing.assert_allclose(out[:, :n], expected, rtol=2e-6, atol=1e-6)
        assert (out[:, n] == 7).all()


@pytest.mark.parametrize("value", [0.0, 1e-30, -1e-30, 20.0, -20.0, 200.0, -200.0, 1e30, np.nan])
def test_gates_at_the_ends_of_their_range(kernels: Kernels, value: float) -> None:
    weights = np.full((32, 1), value, np.float32).view(np.uint8)
    a = kernels.norm_quant(np.ones((1, 1), np.float32))
    for epilogue in (SWIGLU, GEGLU):
        out = np.zeros((1, 32), np.float32)
        ones = np.ones((32, 1), np.float32).view(np.uint8)
        kernels.gemm(kernels.pack(weights, type_number("F32"), 1, ones), a, out, epilogue=epilogue)
        expected = value if np.isnan(value) else max(value, 0.0)
        slack = 1e-7 if epilogue == GEGLU or abs(value) > 100 else 5e-8
        np.testing.assert_allclose(out, np.full((1, 32), expected), rtol=1e-6, atol=slack)


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "F32", "BF16"])
def test_a_row_that_is_not_finite_stays_alone(kernels: Kernels, name: str) -> None:
    w, _ = pack(kernels, name, 32, 64)
    x = inputs(ROWS, 64)
    clean = gemm(kernels, w, kernels.norm_quant(x), 32)
    x[5, 9] = np.nan
    got = gemm(kernels, w, kernels.norm_quant(x), 32)
    assert np.isnan(got[5]).all()
    np.testing.assert_array_equal(np.delete(got, 5, 0), np.delete(clean, 5, 0))


@pytest.mark.parametrize("name", FLOATS + QUANTS)
def test_embedding_rows_are_the_checkpoints(kernels: Kernels, name: str) -> None:
    k = 256
    raw = random_rows(name, 19, k)
    ids = np.array([18, 0, 3, 3], np.int32)
    exact = values(name, raw)[ids]
    np.testing.assert_array_equal(kernels.embed(raw, type_number(name), k, ids), exact)
    scale = np.float32(25.298221)
    np.testing.assert_array_equal(kernels.embed(raw, type_number(name), k, ids, float(scale)), exact * scale)


def test_special_halves_are_read_as_they_are(kernels: Kernels) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    raw = halves.reshape(256, 256)
    table = kernels.embed(raw.view(np.uint8), type_number("F16"), 256, np.arange(256, dtype=np.int32))
    np.testing.assert_array_equal(table, raw.astype(np.float32))


@pytest.mark.parametrize(("number", "k"), [(10, 256), (99, 32), (2, 33), (12, 32), (0, 0)])
def test_unknown_formats_and_broken_blocks_are_refused(kernels: Kernels, number: int, k: int) -> None:
    with pytest.raises(ValueError, match="rows"):
        kernels.pack(np.zeros((4, 256), np.uint8), number, k)
