"""Block formats, written: float32 values to the blocks that model/quantize.py reads.

A block stores few levels, so what matters is its scale. The largest value divided by the largest level is rarely the
best one: the search tries several scales, fits each to the levels it leads to by least squares, keeps the best,
and then alternates between levels and fit. Squared errors may be weighted by how much each input of a matrix matters
(model/calibrate.py).

Inside, values lie as [values of a block, blocks], so that sums over a block are sums of whole vectors. Pieces of a
tensor are encoded on several threads; NumPy leaves the interpreter's lock alone while it computes.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from headrace.model.formats import FORMATS

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

_PIECE = 1 << 15  # values that are encoded together: their temporaries stay in a core's cache
_REFINEMENTS = 2
_F16_MAX = np.float32(65504)


def encode(values: F32, name: str, importance: F32 | None = None, threads: int = 1) -> U8:
    """Rows of float32 [rows, k] as uint8 [rows, row_bytes] in the format `name`, a key of FORMATS.

    `k` is a multiple of the format's block size and all values are finite. `importance` [k] weights squared errors;
    None: all alike. The result does not depend on `threads`.
    """
    fmt = FORMATS[name]
    rows, k = values.shape
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, fmt.block_size)
    weights = (np.ones(k, np.float32) if importance is None else importance).reshape(-1, fmt.block_size)
    out = np.empty((len(flat), fmt.block_bytes), np.uint8)
    step = max(1, _PIECE // fmt.block_size)

    def piece(start: int) -> None:
        blocks = flat[start : start + step]
        weight = weights[np.arange(start, start + len(blocks)) % len(weights)]
        out[start : start + step] = _WRITERS[name](blocks, np.ascontiguousarray(weight.T))

    starts = range(0, len(flat), step)
    if threads > 1 and len(starts) > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(piece, starts))
    else:
        for start in starts:
            piece(start)
    return out.reshape(rows, fmt.row_bytes(k))


def _fit_scale(x: F32, weight: F32, q: F32) -> tuple[F32, F32]:
    """The d of least weighted squared error of d * q, and by how much it lowers the error, each [blocks]."""
    wq = weight * q
    along, length = (wq * x).sum(axis=0), (wq * q).sum(axis=0)
    d = np.divide(along, length, out=np.zeros_like(along), where=length > 0)
    return d, d * along


def _fit_line(x: F32, weight: F32, q: F32) -> tuple[F32, F32, F32]:
    """The d and m of least weighted squared error of d * q + m, and by how much they lower the error, each [blocks]."""
    wq, wx = weight * q, weight * x
    total, sum_q, sum_x = weight.sum(axis=0), wq.sum(axis=0), wx.sum(axis=0)
    sum_qq, sum_xq = (wq * q).sum(axis=0), (wq * x).sum(axis=0)
    det = total * sum_qq - sum_q * sum_q
    d = np.divide(total * sum_xq - sum_x * sum_q, det, out=np.zeros_like(det), where=det > 0)
    m = np.divide(sum_x - d * sum_q, total, out=np.zeros_like(det), where=total > 0)
    return d, m, d * sum_xq + m * sum_x


def _levels(x: F32, d: F32, low: int, high: int) -> F32:
    """The level nearest to each value for scales d [blocks]; whole numbers as float32."""
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=np.abs(d) > 1e-30)
    q: F32 = np.clip(np.rint(x * inverse), low, high)
    return q


def _search_scale(x: F32, weight: F32, low: int, high: int, targets: F32) -> F32:
    """Scales [blocks] for d * q with low <= q <= high. A target is the level that a block's largest value may get."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]
    best = np.full_like(extreme, -1)
    found: F32 = np.zeros_like(extreme)
    for target in targets:
        d, gain = _fit_scale(x, weight, _levels(x, extreme / target, low, high))
        better = gain > best
        best[better], found[better] = gain[better], d[better]
    for _ in range(_REFINEMENTS):
        found = _fit_scale(x, weight, _levels(x, found, low, high))[0]
    return found


def _search_line(x: F32, weight: F32, high: int, targets: F32) -> tuple[F32, F32]:
    """d and m, each [blocks], for d * q + m with 0 <= q <= high. A target is the level that the largest value gets."""
    bottom = x.min(axis=0)
    shifted = x - bottom
    span = shifted.max(axis=0)
    best = np.full_like(span, -1)
    scale, offset = np.zeros_like(span), bottom.copy()
    for target in targets:
        d, m, gain = _fit_line(x, weight, _levels(shifted, span / target, 0, high))
        better = gain > best
        best[better], scale[better], offset[better] = gain[better], d[better], m[better]
    for _ in range(_REFINEMENTS):
        scale, offset, _gain = _fit_line(x, weight, _levels(x - offset, scale, 0, high))
    return scale, offset


def _half(values: F32) -> tuple[npt.NDArray[np.float16], F32]:
    """As f16, and what a reader gets back."""
    half = np.clip(values, -_F16_MAX, _F16_MAX).astype(np.float16)
    return half, half.astype(np.float32)


def _put_half(blocks: U8, start: int, half: npt.NDArray[np.float16]) -> None:
    blocks[:, start : start + 2] = half.reshape(-1, 1).view(np.uint8)


def _put_nibbles(blocks: U8, start: int, q: U8) -> None:
    """Value i of q [32, blocks] in the low nibble of byte i, value i + 16 in the high one."""
    blocks[:, start : start + 16] = ((q[:16] & 15) | (q[16:] << np.uint8(4))).T


def _put_fifth_bits(blocks: U8, start: int, q: U8) -> None:
    blocks[:, start : start + 4] = np.packbits((q >> np.uint8(4)).T, axis=1, bitorder="little")


def _scaled(flat: F32, weight: F32, low: int, high: int, targets: F32) -> tuple[npt.NDArray[np.float16], F32]:
    """Scales [blocks] and levels [values, blocks] of blocks that store no offset."""
    x = np.ascontiguousarray(flat.T)
    half, d = _half(_search_scale(x, weight, low, high, targets))
    return half, _levels(x, d, low, high)


def _q8_0(flat: F32, weight: F32) -> U8:
    half, q = _scaled(flat, weight, -127, 127, _TARGETS_8)  # -128 could overflow in a reader's kernel
    blocks = np.empty((len(flat), 34), np.uint8)
    _put_half(blocks, 0, half)
    blocks[:, 2:] = q.T.astype(np.int8).view(np.uint8)
    return blocks


def _q4_0(flat: F32, weight: F32) -> U8:
    half, q = _scaled(flat, weight, -8, 7, _TARGETS_4)
    blocks = np.empty((len(flat), 18), np.uint8)
    _put_half(blocks, 0, half)
    _put_nibbles(blocks, 2, (q + 8).astype(np.uint8))
    return blocks


def _q5_0(flat: F32, weight: F32) -> U8:
    half, q = _scaled(flat, weight, -16, 15, _TARGETS_5)
    blocks = np.empty((len(flat), 22), np.uint8)
    levels = (q + 16).astype(np.uint8)
    _put_half(blocks, 0, half)
    _put_fifth_bits(blocks, 2, levels)
    _put_nibbles(blocks, 6, levels)
    return blocks


def _with_offset(flat: F32, weight: F32, high: int, block_bytes: int, targets: F32) -> tuple[U8, U8]:
    """Blocks with scale and offset in place, and the levels [values, blocks]."""
    x = np.ascontiguousarray(flat.T)
    scale, offset = _search_line(x, weight, high, targets)
    half_d, d = _half(scale)
    half_m, m = _half(offset)
    blocks = np.empty((len(flat), block_bytes), np.uint8)
    _put_half(blocks, 0, half_d)
    _put_half(blocks, 2, half_m)
    return blocks, _levels(x - m, d, 0, high).astype(np.uint8)


def _q4_1(flat: F32, weight: F32) -> U8:
    blocks, q = _with_offset(flat, weight, 15, 20, _TARGETS_LINE_4)
    _put_nibbles(blocks, 4, q)
    return blocks


def _q5_1(flat: F32, weight: F32) -> U8:
    blocks, q = _with_offset(flat, weight, 31, 24, _TARGETS_LINE_5)
    _put_fifth_bits(blocks, 4, q)
    _put_nibbles(blocks, 8, q)
    return blocks


def _f32(flat: F32, _weight: F32) -> U8:
    return flat.view(np.uint8)


def _f16(flat: F32, _weight: F32) -> U8:
    return _half(flat)[0].view(np.uint8)


def _bf16(flat: F32, _weight: F32) -> U8:
    """Rounded to the nearest, ties to even."""
    bits = flat.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16).view(np.uint8)


_TARGETS_8 = np.array([126.5, 127, 127.4], np.float32)
_TARGETS_4 = np.concatenate([np.linspace(-9.5, -6.5, 13), np.linspace(6.5, 8.5, 9)]).astype(np.float32)
_TARGETS_5 = np.concatenate([np.linspace(-18, -14, 9), np.linspace(14, 17, 7)]).astype(np.float32)
_TARGETS_LINE_4 = np.linspace(14, 19, 11).astype(np.float32)
_TARGETS_LINE_5 = np.linspace(30, 35, 11).astype(np.float32)
_WRITERS: dict[str, Callable[[F32, F32], U8]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}  # fmt: skip
