"""Packs a frozen dataclass of integers and arrays into one buffer with a fixed layout, and back without copying.

    int64 words: magic, the dataclass's integer fields, the number of KV groups G, the shape of every array in order
    arrays in the same order, each starting at a multiple of 64 bytes

An array field's dtype and number of axes are fixed by an `ArraySpec`, so the bytes of equal values are equal. This file
knows no field by name and checks no meaning: `Batch` does that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.errors import HeadraceError

ALIGNMENT = 64
_WORD = 8
Array = npt.NDArray[Any]
Values = dict[str, Any]


class BufferLayoutError(HeadraceError):
    """A buffer does not hold what its header says, or a value does not fit the layout."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array field: `grouped` fields hold a tuple of G arrays of the same dtype and number of axes."""

    name: str
    dtype: Any
    ndim: int = 1
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    magic: int
    scalars: tuple[str, ...]
    arrays: tuple[ArraySpec, ...]

    def expanded(self, num_groups: int) -> list[ArraySpec]:
        """One entry per stored array: a grouped field counts `num_groups` times."""
        return [spec for spec in self.arrays for _ in range(num_groups if spec.grouped else 1)]


def pack(layout: Layout, values: Values) -> bytes:
    """The buffer of `values` (scalar fields as int, array fields as arrays or tuples of arrays).

    Raises BufferLayoutError where an array has another dtype or number of axes than its field.
    """
    num_groups = max((len(values[spec.name]) for spec in layout.arrays if spec.grouped), default=0)
    stored: list[Array] = []
    for spec in layout.arrays:
        arrays: Sequence[Array] = values[spec.name] if spec.grouped else (values[spec.name],)
        if spec.grouped and len(arrays) != num_groups:
            raise BufferLayoutError(f"{spec.name} holds {len(arrays)} groups, other fields hold {num_groups}")
        for array in arrays:
            if array.dtype != np.dtype(spec.dtype) or array.ndim != spec.ndim:
                raise BufferLayoutError(f"{spec.name} is {array.dtype}[{array.ndim}], not {spec.dtype}[{spec.ndim}]")
            stored.append(array)
    words = [layout.magic, *(int(values[name]) for name in layout.scalars), num_groups]
    for array in stored:
        words.extend(array.shape)
    header = np.array(words, dtype=np.int64)
    out = bytearray(header.nbytes)
    out[:] = header.tobytes()
    for array in stored:
        out.extend(bytes(-len(out) % ALIGNMENT))
        out.extend(array.tobytes())
    return bytes(out)


def unpack(layout: Layout, buffer: bytes | memoryview) -> Values:
    """The values that `pack` stored: arrays are read-only views of `buffer`. Raises BufferLayoutError."""
    num_fixed = 2 + len(layout.scalars)
    size = memoryview(buffer).nbytes
    if size < num_fixed * _WORD:
        raise BufferLayoutError(f"buffer of {size} bytes is shorter than its header")
    fixed = np.frombuffer(buffer, np.int64, num_fixed)
    if int(fixed[0]) != layout.magic:
        raise BufferLayoutError(f"buffer starts with {int(fixed[0]):#x}, not {layout.magic:#x}")
    num_groups = int(fixed[-1])
    if not 0 <= num_groups <= size:
        raise BufferLayoutError(f"buffer claims {num_groups} KV groups")
    values: Values = {name: int(fixed[1 + i]) for i, name in enumerate(layout.scalars)}
    specs = layout.expanded(num_groups)
    num_words = num_fixed + sum(spec.ndim for spec in specs)
    if size < num_words * _WORD:
        raise BufferLayoutError(f"buffer of {size} bytes is shorter than its {num_words} header words")
    shapes = np.frombuffer(buffer, np.int64, num_words)[num_fixed:].tolist()
    offset = num_words * _WORD
    for spec in specs:
        shape, shapes = shapes[: spec.ndim], shapes[spec.ndim :]
        array, offset = _view(spec, shape, buffer, offset)
        if spec.grouped:
            values[spec.name] = (*values.get(spec.name, ()), array)
        else:
            values[spec.name] = array
    for spec in layout.arrays:
        values.setdefault(spec.name, ())
    if offset != size:
        raise BufferLayoutError(f"buffer of {size} bytes goes on after its last array, at {offset}")
    return values


def _view(spec: ArraySpec, shape: list[int], buffer: bytes | memoryview, offset: int) -> tuple[Array, int]:
    offset += -offset % ALIGNMENT
    count = 1
    for length in shape:
        count *= length
    dtype = np.dtype(spec.dtype)
    sane = all(0 <= length < 1 << 31 for length in shape)
    if not sane or offset + count * dtype.itemsize > memoryview(buffer).nbytes:
        raise BufferLayoutError(f"{spec.name} with shape {shape} goes beyond the buffer")
    array = np.frombuffer(buffer, dtype, count, offset) if count else np.empty(0, dtype)
    return array.reshape(shape), offset + count * dtype.itemsize
