"""safetensors reader: one file or the shards of an index, memory-mapped.

It knows the container and nothing of models. Header size, dtypes, shapes and byte ranges are checked against the file
before anything is used; a corrupt file gives a ModelFileError that names the file and the field.

    header size u64 | JSON {name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {...}} | data
"""

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.errors import ModelFileError
from headrace.model.json_file import parse_object
from headrace.model.tensor_info import TensorInfo, check_disjoint, map_file, release_pages

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MAX_HEADER = 100_000_000  # the limit of the format's own implementation
_MAX_DIMS = 8
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


class SafetensorsFiles:
    """The tensors of one or more open safetensors files; names are unique over all of them."""

    def __init__(self, paths: list[Path]) -> None:
        self._maps: dict[str, mmap.mmap | bytes] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for path in paths:
            data = map_file(path)
            for name, info in _read_directory(path, data).items():
                if name in self.tensors:
                    raise ModelFileError(path, name, "is in another shard too")
                self.tensors[name] = info
                self._maps[name] = data

    def read(self, name: str) -> "npt.NDArray[np.uint8]":
        """The stored bytes of a tensor: read-only uint8 [rows, row_bytes], a view of the file (rows = 1 for 1-D)."""
        import numpy as np

        info = self.tensors[name]
        flat = np.frombuffer(self._maps[name], dtype=np.uint8, count=info.num_bytes, offset=info.start)
        return flat.reshape(-1, info.shape[-1] * _ITEM_BYTES[info.format])

    def release_pages(self) -> None:
        for data in {id(data): data for data in self._maps.values()}.values():
            release_pages(data)

    def close(self) -> None:
        """Forget the files. A mapping goes when the last array that views it goes."""
        self._maps.clear()


def _read_directory(path: Path, data: mmap.mmap | bytes) -> dict[str, TensorInfo]:
    if len(data) < 8:
        raise ModelFileError(path, "header size", "the file is too short to be safetensors")
    size = int.from_bytes(data[:8], "little")
    if size > min(len(data) - 8, _MAX_HEADER):
        raise ModelFileError(path, "header size", f"is {size}, the file has {len(data)} bytes: truncated or corrupt")
    header = parse_object(path, "header", data[8 : 8 + size])
    header.pop("__metadata__", None)
    start = 8 + size
    tensors = {name: _read_entry(path, name, entry, start, len(data)) for name, entry in header.items()}
    check_disjoint(path, tensors.values())
    return tensors


def _read_entry(path: Path, name: str, entry: Any, data_start: int, file_size: int) -> TensorInfo:
    def fail(problem: str) -> ModelFileError:
        return ModelFileError(path, name, problem)

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise fail("its header entry has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise fail(f"has the unknown dtype {dtype!r}")
    if not _is_counts(shape) or len(shape) > _MAX_DIMS:
        raise fail(f"has the bad shape {shape!r}")
    if not _is_counts(offsets) or len(offsets) != 2:
        raise fail(f"has the bad data_offsets {offsets!r}")
    begin, end = offsets
    num_bytes = _ITEM_BYTES[dtype]
    for dim in shape:
        num_bytes *= dim
    if end - begin != num_bytes:
        raise fail(f"its {dtype} {shape} takes {num_bytes} bytes, its data_offsets hold {end - begin}")
    if data_start + end > file_size:
        raise fail(f"its bytes end at {data_start + end}, the file at {file_size}: truncated, fetch it again")
    return TensorInfo(name, dtype, tuple(shape), data_start + begin, num_bytes)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in value)
