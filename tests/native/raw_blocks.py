"""Random checkpoint rows of every GGUF block format, and what the gguf package says their values are."""

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

Bytes = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

FLOATS = ["F32", "F16", "BF16"]
QUANTS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]

# Where a block keeps its f16 scales; everything else in it may hold any bits.
_SCALES_AT = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
_SCALES_AT |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def type_number(name: str) -> int:
    return int(GGMLQuantizationType[name])


def block_inputs(name: str) -> int:
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[name]][0])


def random_rows(name: str, n: int, k: int, seed: int = 0) -> Bytes:
    """[n, row bytes]"""
    rng = np.random.default_rng(seed)
    if name in FLOATS:
        values = rng.standard_normal((n, k)).astype(np.float32)
        if name == "F16":
            return values.astype(np.float16).view(np.uint8)
        if name == "BF16":
            return np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
        return values.view(np.uint8)
    inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (n, k // inputs, size), np.uint8)
    for at in _SCALES_AT[name]:
        scales = (0.02 * rng.standard_normal((n, k // inputs, 1))).astype(np.float16)
        blocks[:, :, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(n, -1)


def extreme_rows(name: str, n: int, k: int, fill: int) -> Bytes:
    """Rows whose value bits are all `fill` (0 or 255) and whose scales are 1/64."""
    inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = np.full((n, k // inputs, size), fill, np.uint8)
    for at in _SCALES_AT[name]:
        blocks[:, :, at : at + 2] = np.array([1 / 64], np.float16).view(np.uint8)
    if name == "Q8_0":
        blocks[:, :, 2:] = 0x80 if fill else 0x7F  # -128, 127
    return blocks.reshape(n, -1)


def values(name: str, rows: Bytes) -> F32:
    """[n, k]"""
    result: F32 = dequantize(rows, GGMLQuantizationType[name]).reshape(len(rows), -1)
    return result
