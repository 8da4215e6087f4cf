"""Encoders against the gguf package, which writes and reads the same blocks."""

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from headrace.model.encode import encode
from headrace.model.formats import FORMATS
from headrace.model.quantize import dequantize

BLOCKS = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
FLOATS = ("F32", "F16", "BF16")
F32 = npt.NDArray[np.float32]


def error(values: F32, stored: npt.NDArray[np.uint8], name: str) -> float:
    """Mean squared error, by a reader that is not ours."""
    found = gguf.dequantize(stored, gguf.GGMLQuantizationType[name])
    return float(((found - values).astype(np.float64) ** 2).mean())


def weights(seed: int = 0) -> F32:
    """Rows of different sizes and tails, as in a model."""
    rng = np.random.default_rng(seed)
    values = rng.standard_t(6, (64, 256)) * rng.uniform(0.01, 0.2, (64, 1))
    return values.astype(np.float32)


@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_rounded_to_the_nearest(name: str) -> None:
    values = weights()
    expected = gguf.quantize(values, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(encode(values, name), expected.view(np.uint8).reshape(64, -1))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_read_alike_by_others_and_err_less_than_the_largest_value_rule(name: str) -> None:
    values = weights()
    stored = encode(values, name)
    assert stored.dtype == np.uint8 and stored.shape == (64, FORMATS[name].row_bytes(256))
    np.testing.assert_array_equal(
        dequantize(stored, name), gguf.dequantize(stored, gguf.GGMLQuantizationType[name]).reshape(64, 256)
    )
    plain = error(values, gguf.quantize(values, gguf.GGMLQuantizationType[name]), name)
    assert error(values, stored, name) < 0.97 * plain


@pytest.mark.parametrize("name", BLOCKS)
def test_no_block_is_worse_than_by_the_largest_value_rule(name: str) -> None:
    """Up to the rounding of scales to f16, which both suffer."""
    values = weights(1).reshape(-1, 32)
    ours = dequantize(encode(values, name), name) - values
    plain = gguf.dequantize(gguf.quantize(values, gguf.GGMLQuantizationType[name]), gguf.GGMLQuantizationType[name])
    worse = (ours**2).sum(axis=1) / ((plain - values) ** 2).sum(axis=1)
    assert worse.max() < 1.2


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_one_value_and_of_none(name: str) -> None:
    values = np.zeros((5, 32), np.float32)
    values[1] = 0.37
    values[2] = -0.37
    values[3, 7] = -2.5
    values[4] = 1e-9
    found = dequantize(encode(values, name), name)
    assert (found[0] == 0).all()
    np.testing.assert_allclose(found[1:4], values[1:4], rtol=1e-3, atol=1e-3)
    assert (np.abs(found[4]) < 1e-7).all()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_values_that_matter_more_err_less(name: str) -> None:
    values = weights()
    importance = np.where(np.arange(256) % 7 == 3, 100, 1).astype(np.float32)
    squares = [(dequantize(encode(values, name, given), name) - values) ** 2 for given in (None, importance)]
    plain, weighted = ((square * importance).mean() for square in squares)
    assert weighted < 0.7 * plain
    assert squares[1].mean() > squares[0].mean()  # what the others pay


@pytest.mark.parametrize("name", BLOCKS)
def test_threads_change_nothing(name: str) -> None:
    values = np.concatenate([weights(seed) for seed in range(8)])
    assert values.size > 3 << 15  # several pieces
    importance = np.random.default_rng(1).uniform(0.1, 3, 256).astype(np.float32)
    one, three = (encode(values, name, importance, threads) for threads in (1, 3))
    np.testing.assert_array_equal(one, three)
    rows = np.concatenate([encode(row[None], name, importance) for row in values[:70]])
    np.testing.assert_array_equal(one[:70], rows)  # whatever stands beside it
