"""TensorInfo: where one stored tensor lies in its mapped file. Shared by the GGUF and safetensors readers."""

import mmap
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from headrace.base.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` is (out, in) or (n,), the last axis contiguous in storage; `start` counts from the file's first byte."""

    name: str
    format: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def check_disjoint(path: Path, tensors: Iterable[TensorInfo]) -> None:
    """Raise ModelFileError when two byte ranges of one file overlap: such a file is corrupt or hostile."""
    ordered = sorted(tensors, key=lambda t: (t.start, t.num_bytes))
    for before, after in pairwise(ordered):
        if after.start < before.start + before.num_bytes:
            raise ModelFileError(path, after.name, f"its bytes overlap those of {before.name}")


def map_file(path: Path) -> mmap.mmap | bytes:
    """The whole file, mapped read-only. Raises ModelFileError when it is empty or cannot be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            raise ModelFileError(path, "file", "is no regular file")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # an empty file cannot be mapped
        raise ModelFileError(path, "file", "is empty") from None
    except OSError as error:
        raise ModelFileError(path, "file", f"cannot be read: {error.strerror}") from None


def release_pages(data: mmap.mmap | bytes) -> None:
    """Takes the pages of a mapped file out of this process's memory; they stay in the page cache, and readable."""
    if isinstance(data, mmap.mmap):
        data.madvise(mmap.MADV_DONTNEED)
