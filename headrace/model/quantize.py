"""Tensors of every block format read as float32 with plain NumPy. The layouts are those of the GGUF specification.

This is the slow, exact reading: the native library packs blocks without going through floats.

    Q4_0  d:f16, 16 bytes of nibbles             w = d * (q - 8)       value i in the low nibble of byte i,
    Q4_1  d, m:f16, 16 bytes                     w = d * q + m         value i + 16 in the high nibble
    Q5_0  d:f16, 32 high bits, 16 bytes          w = d * (q - 16)
    Q5_1  d, m:f16, 32 high bits, 16 bytes       w = d * q + m
    Q8_0  d:f16, 32 int8                         w = d * q
    Q4_K  d, dmin:f16, 8 x 6-bit (scale, min), 128 bytes          w = d * scale * q - dmin * min   groups of 32
    Q5_K  as Q4_K with 32 bytes of high bits before the nibbles
    Q6_K  128 bytes low nibbles, 64 bytes high pairs, 16 int8 scales, d:f16   w = d * scale * (q - 32)   groups of 16
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headrace.model.formats import FORMATS

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


def dequantize(data: U8, name: str) -> F32:
    """Values of uint8 [rows, row_bytes] stored as `name`, as float32 [rows, k]. `name` is a key of FORMATS."""
    fmt = FORMATS[name]
    rows = data.shape[0]
    blocks = np.ascontiguousarray(data).reshape(-1, fmt.block_bytes)
    return _READERS[name](blocks).reshape(rows, -1)


def _half(blocks: U8, start: int) -> F32:
    """The f16 at byte `start` of every block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: U8) -> U8:
    """Low nibbles of all bytes, then the high ones: [n, b] -> [n, 2b]."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _fifth_bits(packed: U8) -> U8:
    """Bit i of the 32-bit field belongs to value i: uint8 [n, 4] -> [n, 32], already worth 16."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little") << np.uint8(4)


def _f32(blocks: U8) -> F32:
    return blocks.view(np.float32).copy()


def _f16(blocks: U8) -> F32:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: U8) -> F32:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: U8) -> F32:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: U8) -> F32:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: U8) -> F32:
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (q.astype(np.float32) - 16)


def _q5_1(blocks: U8) -> F32:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * q.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: U8) -> F32:
    return _half(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def _six_bit_pairs(packed: U8) -> tuple[U8, U8]:
    """The 8 scales and 8 mins of a Q4_K or Q5_K block: uint8 [n, 12] -> two of [n, 8].

    The first four of each lie in the low six bits of bytes 0-3 and 4-7; the last four have their low nibbles in bytes
    8-11 (scale low, min high) and their two high bits on top of the first four.
    """
    low, mid, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (last & 15) | (low >> 6 << 4)], axis=1)
    mins = np.concatenate([mid & 63, (last >> 4) | (mid >> 6 << 4)], axis=1)
    return scales, mins


def _k_values(blocks: U8, q: U8) -> F32:
    """w = d * scale * q - dmin * min for q [n, 8, 32] of a Q4_K or Q5_K block."""
    scales, mins = _six_bit_pairs(blocks[:, 4:16])
    d = _half(blocks, 0) * scales.astype(np.float32)
    m = _half(blocks, 2) * mins.astype(np.float32)
    return d[:, :, None] * q.astype(np.float32) - m[:, :, None]


def _q4_k(blocks: U8) -> F32:
    packed = blocks[:, 16:].reshape(-1, 4, 32)  # 32 bytes hold group 2i in low nibbles, 2i + 1 in high ones
    q = np.stack([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32)
    return _k_values(blocks, q)


def _q5_k(blocks: U8) -> F32:
    packed = blocks[:, 48:].reshape(-1, 4, 32)
    q = np.stack([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32)
    bit = np.arange(8, dtype=np.uint8)[None, :, None]  # bit g of byte i is the fifth bit of value i of group g
    high = (blocks[:, 16:48][:, None, :] >> bit) & 1
    return _k_values(blocks, q | (high << 4))


def _q6_k(blocks: U8) -> F32:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)  # [half, byte run, 32]
    q = np.concatenate([low & 15, low >> 4], axis=2)  # [half, 4 runs, 32]
    shift = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift) & 3
    values = (q | (high << 4)).astype(np.float32).reshape(-1, 16, 16) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    d: F32 = _half(blocks, 208) * scales
    scaled: F32 = d[:, :, None] * values
    return scaled


_READERS: dict[str, Callable[[U8], F32]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
