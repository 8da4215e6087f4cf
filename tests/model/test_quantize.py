"""Every block format against the `gguf` package, on quantised data and on arbitrary bit patterns."""

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from headrace.model.formats import FORMATS, UNSUPPORTED_NAMES, format_of_type
from headrace.model.quantize import dequantize


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_gguf_package(name: str) -> None:
    kind = GGMLQuantizationType[name]
    assert FORMATS[name].type_number == kind.value
    assert (FORMATS[name].block_size, FORMATS[name].block_bytes) == GGML_QUANT_SIZES[kind]
    assert format_of_type(kind.value) is FORMATS[name]


def test_names_of_refused_types_are_those_of_the_gguf_package() -> None:
    for number, name in UNSUPPORTED_NAMES.items():
        assert GGMLQuantizationType(number).name == name
        assert format_of_type(number) is None


@pytest.mark.parametrize("name", FORMATS)
def test_any_bit_pattern_reads_as_the_gguf_package_reads_it(name: str) -> None:
    rng = np.random.default_rng(1)
    rows, blocks = 5, 3
    data = rng.integers(0, 256, size=(rows, blocks * FORMATS[name].block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales may be NaN or overflow: both sides must agree on that too
        expected = gguf.dequantize(data, GGMLQuantizationType[name])
        values = dequantize(data, name)
    assert values.dtype == np.float32
    assert values.shape == (rows, blocks * FORMATS[name].block_size)
    np.testing.assert_array_equal(values, expected.astype(np.float32))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"])
def test_quantised_values_come_back_within_a_step(name: str) -> None:
    values = np.random.default_rng(2).normal(size=(4, 96)).astype(np.float32)
    stored = gguf.quantize(values, GGMLQuantizationType[name]).view(np.uint8).reshape(4, -1)
    step = {"Q4": 0.5, "Q5": 0.25, "Q8": 0.03}.get(name[:2], 0.02)
    assert np.abs(dequantize(stored, name) - values).max() < step


def test_rows_that_are_not_contiguous_read_the_same() -> None:
    data = np.random.default_rng(3).integers(0, 100, size=(4, 2 * 34), dtype=np.uint8)
    np.testing.assert_array_equal(dequantize(data[::2], "Q8_0"), dequantize(data, "Q8_0")[::2])
