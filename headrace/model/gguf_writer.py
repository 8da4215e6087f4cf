"""GGUF writer (version 3, little-endian): the inverse of model/gguf.py. It knows the container and nothing of models.

The file grows under a temporary name beside its final one. Its room is reserved first and its header is complete from
the start, so a full disk is found before the work, and what was described can be read back and checked before a
tensor is computed. Only `commit` gives it its name: a reader sees a whole file or none.
"""

import os
import shutil
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.errors import ExportError
from headrace.model.formats import FORMATS
from headrace.model.tensor_info import TensorInfo

ALIGNMENT = 32
_VERSION = 3
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64, _I64 = 4, 5, 6, 7, 8, 9, 10, 11
_SPARE = 64 << 20  # bytes that a disk keeps free
# type code of `array` -> GGUF's number of the value type
_ITEM_TYPES = {
    "B": 0, "b": 1, "H": 2, "h": 3, "I": _U32, "i": _I32, "f": _F32, "Q": _U64, "q": _I64, "d": 12,
}  # fmt: skip


class GGUFWriter:
    """One file being written; a context manager that removes the temporary file unless `commit` was called.

    `metadata` values: bool, str, int (u32; u64 where larger, i32 where negative), float (f32), an `array` of numbers,
    or a sequence of strings or of booleans: what GGUFFile gives. `tensors`: name -> (format, shape (out, in) or (n,)),
    in the order in which they are stored. Raises ExportError when the file exists and `force` is not set, or when there
    is no room for it.
    """

    def __init__(
        self, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]], force: bool
    ) -> None:
        self.path = path
        check_path(path, force)
        header, self._infos = _layout(metadata, tensors)
        self.num_bytes = max((info.start + info.num_bytes for info in self._infos.values()), default=len(header))
        _check_room(path, self.num_bytes)
        self._written: dict[str, int] = {}
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._file = self.temporary.open("wb")
        try:
            self._file.write(header)
            self._file.flush()
            _reserve(self._file.fileno(), path, self.num_bytes)
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> "GGUFWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    def append(self, name: str, part: npt.NDArray[np.uint8]) -> None:
        """The next bytes of a tensor."""
        info, written = self._infos[name], self._written.get(name, 0)
        if written + part.nbytes > info.num_bytes:
            raise ValueError(f"{name}: more bytes than the {info.num_bytes} that were described")
        self._file.seek(info.start + written)
        self._file.write(np.ascontiguousarray(part).data)
        self._file.flush()  # so that who reads the temporary file finds it
        self._written[name] = written + part.nbytes

    def commit(self) -> None:
        """Puts the finished file on the disk and gives it its name."""
        for info in self._infos.values():
            if self._written.get(info.name, 0) != info.num_bytes:
                raise ValueError(f"{info.name}: fewer bytes than the {info.num_bytes} that were described")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.temporary.replace(self.path)

    def _discard(self) -> None:
        self._file.close()
        self.temporary.unlink(missing_ok=True)


def check_path(path: Path, force: bool) -> None:
    """Raises ExportError when no file may be written there."""
    if path.is_dir():
        raise ExportError(f"{path} is a folder; give the name of a file in it, such as {path / 'model.gguf'}")
    if path.exists() and not force:
        raise ExportError(f"{path} exists; give --force to replace it, or another name with --output")
    if not path.parent.is_dir():
        raise ExportError(f"the folder {path.parent} does not exist; create it, or write elsewhere with --output")


def _layout(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[bytes, dict[str, TensorInfo]]:
    """Everything before the tensors, padded, and where each tensor lies."""
    pairs = b"".join(_string(key) + _value(key, value) for key, value in metadata.items())
    directory, sizes, offset = b"", {}, 0
    for name, (fmt, shape) in tensors.items():
        num_bytes = FORMATS[fmt].row_bytes(shape[-1])
        for dim in shape[:-1]:
            num_bytes *= dim
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        directory += _string(name) + dims + struct.pack("<IQ", FORMATS[fmt].type_number, offset)
        sizes[name] = (fmt, shape, offset, num_bytes)
        offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    header = b"GGUF" + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata)) + pairs + directory
    header += bytes(-len(header) % ALIGNMENT)
    infos = {
        name: TensorInfo(name, fmt, shape, len(header) + start, num_bytes)
        for name, (fmt, shape, start, num_bytes) in sizes.items()
    }
    return header, infos


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: Any) -> bytes:
    """A value behind the number of its type."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        kind, code = (_I32, "i") if value < 0 else (_U32, "I") if value < 1 << 32 else (_U64, "Q")
        return struct.pack(f"<I{code}", kind, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, array):
        return struct.pack("<IIQ", _ARRAY, _ITEM_TYPES[value.typecode], len(value)) + value.tobytes()
    if isinstance(value, Sequence) and value and all(isinstance(item, bool) for item in value):
        return struct.pack(f"<IIQ{len(value)}?", _ARRAY, _BOOL, len(value), *value)
    if isinstance(value, Sequence):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
    raise TypeError(f"{key}: {type(value).__name__} has no GGUF type")


def _check_room(path: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if num_bytes + _SPARE > free:
        raise ExportError(
            f"{path} needs {num_bytes / 1e6:,.0f} MB, its disk has {free / 1e6:,.0f} MB free; "
            "make room, or write to another disk with --output"
        )


def _reserve(file: int, path: Path, num_bytes: int) -> None:
    """Gives the file its full length, with disk blocks behind it where the file system can promise them."""
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        raise ExportError(f"{path} cannot get its {num_bytes / 1e6:,.0f} MB: {error.strerror}") from None
