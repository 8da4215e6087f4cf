"""The file that keeps packed weights: a header, then named sections of bytes, each on pages of its own.

    magic | bytes of the header u64 | SHA-256 of the header | header (JSON) | padding | section | padding | section ...

The header says which layouts these are, which model they were made of, and for every MiB of every section its checksum.
What a section holds is known by its name only, so further arrays that are made at load can lie beside the weights.
Offsets count from the first page after the header. Knows no backend and no folder.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from struct import Struct

import msgspec
import numpy as np
import numpy.typing as npt

from headrace import _C

Bytes = npt.NDArray[np.uint8]

MAGIC = b"HRPACK\x00\x01"  # the last byte is the version of this form of file
_PREFIX = Struct("<8sQ32s")
_MAX_HEADER = 64 << 20
_PAGE = 4096
_WRITE_BYTES = 4 << 20  # between two looks at whether to go on


class PackFileError(Exception):
    """A file that cannot be used, and why."""


class SourceFile(msgspec.Struct, frozen=True):
    """A file of the model as the file system knew it. A write changes both times, and nobody can set ctime back."""

    name: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class Section(msgspec.Struct, frozen=True):
    name: str
    offset: int
    nbytes: int
    sums: list[int]


class Header(msgspec.Struct, frozen=True):
    layout: str  # of the sections: version and instruction set
    model: str  # path, for people
    files: list[SourceFile]
    content: str  # SHA-256 over the files, in order
    sections: list[Section]

    def data_bytes(self) -> int:
        return max((section.offset + section.nbytes for section in self.sections), default=0)


def source_files(paths: Sequence[Path]) -> list[SourceFile]:
    """Raises OSError."""
    stats = [(path, path.stat()) for path in paths]
    return [SourceFile(path.name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for path, s in stats]


def content_hash(paths: Sequence[Path]) -> str:
    """SHA-256 over the SHA-256 of each file. Raises OSError."""
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def read_header(fd: int) -> tuple[Header, int]:
    """The header, checked against its hash and the file's size, and where the sections begin.

    Raises PackFileError or OSError.
    """
    prefix = os.pread(fd, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size:
        raise PackFileError("it is truncated")
    magic, length, digest = _PREFIX.unpack(prefix)
    if magic != MAGIC or length > _MAX_HEADER:
        raise PackFileError("it is no file of packed weights that this version reads")
    body = os.pread(fd, length, _PREFIX.size)
    if hashlib.sha256(body).digest() != digest:
        raise PackFileError("its header is damaged")
    try:
        header = msgspec.json.decode(body, type=Header)
    except msgspec.DecodeError as error:
        raise PackFileError(f"its header is of another kind: {error}") from error
    begin = _aligned(_PREFIX.size + length)
    if os.fstat(fd).st_size != begin + header.data_bytes():
        raise PackFileError("it is truncated")
    return header, begin


def place(sections: Mapping[str, Bytes]) -> list[Section]:
    """Where each section goes, and its checksums."""
    placed, offset = [], 0
    for name, data in sections.items():
        placed.append(Section(name, offset, data.nbytes, _C.checksums(data)))
        offset = _aligned(offset + data.nbytes)
    return placed


def write(fd: int, header: Header, sections: Mapping[str, Bytes]) -> Iterator[None]:
    """Writes to an empty file, stopping now and then so that the caller can give up. Raises OSError."""
    body = msgspec.json.encode(header)
    begin = _aligned(_PREFIX.size + len(body))
    _write(fd, memoryview(_PREFIX.pack(MAGIC, len(body), hashlib.sha256(body).digest()) + body), 0)
    for section in header.sections:
        view = sections[section.name].data
        for at in range(0, section.nbytes, _WRITE_BYTES):
            yield
            _write(fd, view[at : at + _WRITE_BYTES], begin + section.offset + at)


def _aligned(offset: int) -> int:
    return -(-offset // _PAGE) * _PAGE


def _write(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
