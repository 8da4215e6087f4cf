"""GGUF reader (versions 2 and 3, little-endian): metadata and tensor directory, memory-mapped.

It knows the container and nothing of models. NumPy is imported by the first who reads a tensor: a server reads only
metadata, and starts without it. Every count, length, type and offset is checked against the file before it
is used, so a corrupt file gives a ModelFileError that names the field: never a crash, never an allocation that the
file's own size does not bound.

    magic "GGUF" | version u32 | tensor count u64 | pair count u64
    pairs    key string, type u32, value             string = length u64 + UTF-8; array = type u32 + count u64 + values
    tensors  name string, n_dims u32, dims u64[n_dims] (innermost first), type u32, offset u64 from the data start
    padding to `general.alignment` (32), then the data

Layout source: the GGUF specification of the ggml project.
"""

import mmap
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from headrace.base.errors import ModelFileError
from headrace.model.formats import FORMATS, UNSUPPORTED_NAMES, format_of_type
from headrace.model.tensor_info import TensorInfo, check_disjoint, map_file, release_pages

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {  # type -> type code of `array`
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 16


class GGUFFile:
    """An open GGUF file.

    `metadata` holds Python scalars and strings; arrays of strings are `StringArray` (a lazy Sequence[str]), arrays of
    numbers are `array.array`, of booleans lists.
    `tensors` maps a stored name to its place. Raises ModelFileError when the file is not a sound GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        cursor = _Cursor(path, self._map)
        tensor_count, pair_count = _read_header(cursor)
        self.version = cursor.version
        self.metadata = _read_metadata(cursor, pair_count)
        self.alignment = _alignment(path, self.metadata)
        self.tensors = _read_tensors(cursor, tensor_count, self.alignment)

    def read(self, name: str) -> "npt.NDArray[np.uint8]":
        """The stored bytes of a tensor: read-only uint8 [rows, row_bytes], a view of the file (rows = 1 for 1-D)."""
        import numpy as np

        info = self.tensors[name]
        row_bytes = FORMATS[info.format].row_bytes(info.shape[-1])
        flat = np.frombuffer(self._map, dtype=np.uint8, count=info.num_bytes, offset=info.start)
        return flat.reshape(-1, row_bytes)

    def release_pages(self) -> None:
        release_pages(self._map)

    def close(self) -> None:
        """Forget the file. The mapping itself goes when the last array that views it goes."""
        self._map = b""


class StringArray(Sequence[str]):
    """An array of strings that decodes when read; its places in the file are already checked.

    `starts[i]` is where string i's length prefix begins in `data`, `starts[-1]` is the end. Reading a string that is
    not UTF-8 raises ModelFileError.
    """

    def __init__(self, path: Path, field: str, data: bytes, starts: list[int]) -> None:
        self._path = path
        self._field = field
        self._data = data
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        try:
            return self._data[self._starts[at] + 8 : self._starts[at + 1]].decode()
        except UnicodeDecodeError:
            raise ModelFileError(self._path, self._field, f"string {at} is not UTF-8 text") from None

    def __iter__(self) -> Iterator[str]:
        data, starts = self._data, self._starts
        try:
            return iter([data[a + 8 : b].decode() for a, b in pairwise(starts)])
        except UnicodeDecodeError:
            raise ModelFileError(self._path, self._field, "holds a string that is not UTF-8 text") from None


class _Cursor:
    """A position in the file that only moves over bytes that exist. `field` names what is being read, for errors."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.pos = 0
        self.field = "header"
        self.version = 0

    def fail(self, problem: str) -> ModelFileError:
        return ModelFileError(self.path, self.field, problem)

    def take(self, count: int) -> int:
        """Move over `count` bytes and return where they start."""
        start = self.pos
        if count > self.size - start:
            raise self.fail(f"needs {count} bytes at offset {start}, the file has {self.size}")
        self.pos = start + count
        return start

    def u32(self) -> int:
        value: int = _U32.unpack_from(self.data, self.take(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack_from(self.data, self.take(8))[0]
        return value

    def string(self) -> str:
        length = self.u64()
        start = self.take(length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.fail("is not UTF-8 text") from None

    def name(self, kind: str, index: int) -> str:
        """The key of a pair or the name of a tensor, which becomes the field that later errors name."""
        self.field = f"{kind} {index}"
        text = self.string()
        if not text:
            raise self.fail("is empty")
        return text

    def strings(self, count: int) -> "StringArray":
        """`count` strings. A vocabulary has 262k of them: walk over the lengths now, decode when asked."""
        if count > (self.size - self.pos) // 8:
            raise self.fail(f"claims {count} strings, more than the file can hold")
        data, size, begin, pos = self.data, self.size, self.pos, self.pos
        unpack = _U64.unpack_from
        starts: list[int] = []
        append = starts.append
        try:
            for _ in range(count):
                append(pos - begin)
                pos += 8 + unpack(data, pos)[0]
        except (struct.error, OverflowError):  # a length led past the end of the file
            raise self.fail(f"string {len(starts) - 1} of {count} runs past the end of the file") from None
        if pos > size:
            raise self.fail(f"string {count - 1} of {count} runs past the end of the file")
        append(pos - begin)
        self.pos = pos
        return StringArray(self.path, self.field, data[begin:pos], starts)

    def numbers(self, kind: int, count: int) -> "array[Any] | list[bool]":
        values: array[Any] = array(_SCALARS[kind])
        start = self.take(count * values.itemsize)
        values.frombytes(self.data[start : self.pos])
        if sys.byteorder == "big":
            values.byteswap()
        if kind != _BOOL:
            return values
        if max(values, default=0) > 1:
            raise self.fail("holds a boolean that is neither 0 nor 1")
        return list(map(bool, values))


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    if cursor.data[:4] != b"GGUF":
        raise cursor.fail("does not start with the magic bytes GGUF: not a GGUF file")
    cursor.take(4)
    cursor.field = "version"
    cursor.version = cursor.u32()
    if cursor.version & 0xFFFF == 0:
        raise cursor.fail("the file is big-endian; only little-endian files are supported")
    if cursor.version not in (2, 3):
        raise cursor.fail(f"is {cursor.version}; versions 2 and 3 are supported")
    cursor.field = "tensor_count"
    tensor_count = cursor.u64()
    cursor.field = "metadata_kv_count"
    pair_count = cursor.u64()
    room = cursor.size - cursor.pos
    if pair_count > room // 13:  # key length, type, one byte of value
        raise cursor.fail(f"claims {pair_count} pairs, more than the file can hold")
    cursor.field = "tensor_count"
    if tensor_count > room // 32:  # name length, n_dims, one dim, type, offset
        raise cursor.fail(f"claims {tensor_count} tensors, more than the file can hold")
    return tensor_count, pair_count


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.name("key of metadata pair", index)
        if key in metadata:
            raise cursor.fail(f"{key!r} occurs twice")
        cursor.field = key
        metadata[key] = _read_value(cursor, cursor.u32())
    return metadata


def _read_value(cursor: _Cursor, kind: int) -> Any:
    if kind == _STRING:
        return cursor.string()
    if kind == _ARRAY:
        item, count = cursor.u32(), cursor.u64()
        if item == _STRING:
            return cursor.strings(count)
        if item not in _SCALARS:
            raise cursor.fail(f"is an array of type {item}, which is not supported")
        return cursor.numbers(item, count)
    if kind not in _SCALARS:
        raise cursor.fail(f"has the unknown value type {kind}")
    return cursor.numbers(kind, 1)[0]


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ModelFileError(path, "general.alignment", f"is {alignment!r}, not a power of two up to {_MAX_ALIGNMENT}")
    return alignment


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    relative: dict[str, TensorInfo] = {}
    for index in range(count):
        name = cursor.name("name of tensor", index)
        if name in relative:
            raise cursor.fail(f"{name!r} occurs twice")
        cursor.field = name
        relative[name] = _read_tensor(cursor, name)
    data_start = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, info in relative.items():
        start = data_start + info.start
        if info.start % alignment:
            raise ModelFileError(cursor.path, name, f"its offset {info.start} is not a multiple of {alignment}")
        if start + info.num_bytes > cursor.size:
            problem = f"its {info.num_bytes} bytes at {start} run past the end of the file ({cursor.size} bytes)"
            raise ModelFileError(cursor.path, name, problem + ": truncated, fetch it again")
        tensors[name] = TensorInfo(name, info.format, info.shape, start, info.num_bytes)
    check_disjoint(cursor.path, tensors.values())
    return tensors


def _read_tensor(cursor: _Cursor, name: str) -> TensorInfo:
    """One directory entry; its `start` still counts from the data start."""
    num_dims = cursor.u32()
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.fail(f"has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
    dims = [cursor.u64() for _ in range(num_dims)]
    number = cursor.u32()
    offset = cursor.u64()
    fmt = format_of_type(number)
    if fmt is None:
        label = UNSUPPORTED_NAMES.get(number, "unknown")
        raise cursor.fail(f"is stored as type {number} ({label}); supported: {', '.join(FORMATS)}")
    if 0 in dims:
        raise cursor.fail(f"has an empty dimension: {dims}")
    if dims[0] % fmt.block_size:
        raise cursor.fail(f"its rows of {dims[0]} values are not whole {fmt.name} blocks of {fmt.block_size}")
    num_bytes = fmt.row_bytes(dims[0])
    for dim in dims[1:]:
        num_bytes *= dim
    return TensorInfo(name, fmt.name, tuple(reversed(dims)), offset, num_bytes)
