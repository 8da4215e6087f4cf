"""PackCache: packed weights on disk, so that the next start reads them instead of packing them again.

    <folder>/<key>.pack      key: model path, instruction set, version of the layouts
    <folder>/partial-*       being written, by the one process that holds .lock

A file is used for the very bytes it was made of: while size, times and inode of the model's files are what they were,
else only if their SHA-256 still is. Every MiB is checked against its checksum as it is read. It is written by a thread
of its own, under a temporary name, flushed and renamed: seen whole or not at all. Whatever is wrong with a file or the
disk costs one line in the log and a packing, never a start. Files are read into huge pages, not mapped (ADR 6).
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace import _C
from headrace.backend.pack_file import (
    Bytes,
    Header,
    PackFileError,
    SourceFile,
    content_hash,
    place,
    read_header,
    source_files,
    write,
)

log = logging.getLogger(__name__)

_MIN_BYTES = 8 << 20  # what is smaller is packed faster than it is looked for
_SETTLED_NS = 2_000_000_000  # a file this old shows its next change in its times, however coarse they are
_NICENESS = 15


class PackCache:
    def __init__(self, folder: Path, model: Path, max_bytes: int, min_bytes: int = _MIN_BYTES) -> None:
        """Make it before the model is opened: what it sees of the files then is what the model is known by.

        `max_bytes` bounds all files in `folder` together: the least recently used go first. Models of less than
        `min_bytes` when packed are left alone. Raises OSError when the model's files cannot be looked at.
        """
        self._folder = folder
        self._model = model
        self._max_bytes = max_bytes
        self._min_bytes = min_bytes
        self._paths = [model] if model.is_file() else sorted(model.glob("*.safetensors"))
        self._files = source_files(self._paths)
        self._seen_ns = time.time_ns()
        self._is_current = False  # what is on disk needs no writing
        self._stop = threading.Event()
        self._writer: threading.Thread | None = None

    def restore(self, pool: _C.Pool, isa: str, sections: Mapping[str, Bytes]) -> set[str]:
        """Fills arrays with what was stored under their names; gives the names of those that must be made anew.

        The content of these is then undefined.
        """
        missing = set(sections)
        path = self._path(isa)
        if _size(sections) < self._min_bytes:
            return missing
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return missing
        try:
            header, begin = read_header(fd)
            if header.layout == _layout(isa) and self._is_of_model(header):
                missing -= _read(pool, (fd, begin), header, sections)
                self._is_current = self._is_current and not missing
                _mark_used(path)
                if missing:
                    raise PackFileError(f"{len(missing)} of {len(sections)} sections are missing or damaged")
        except (OSError, PackFileError) as error:
            log.warning("packed weights in %s: %s; what is wrong is packed anew", path, error)
        finally:
            os.close(fd)
        return missing

    def store(self, isa: str, sections: Mapping[str, Bytes]) -> None:
        """Writes the sections, unless `restore` found all that is needed. Returns at once.

        The arrays must not change any more.
        """
        if _size(sections) >= self._min_bytes and not self._is_current:
            self._writer = threading.Thread(target=self._store, args=(isa, sections), name="pack-cache")
            self._writer.start()

    def wait(self) -> None:
        """Until what `store` began is done."""
        if self._writer is not None:
            self._writer.join()

    def close(self) -> None:
        """Gives up what is being written."""
        self._stop.set()
        self.wait()

    def _path(self, isa: str) -> Path:
        key = hashlib.sha256(os.fsencode(self._model.resolve()) + b"\n" + _layout(isa).encode()).hexdigest()
        return self._folder / f"{key[:32]}.pack"

    def _is_of_model(self, header: Header) -> bool:
        """Whether the file was made of the bytes that the model has now. Raises OSError."""
        if source_files(self._paths) != self._files:
            return False
        self._is_current = header.files == self._files
        return self._is_current or header.content == content_hash(self._paths)

    def _store(self, isa: str, sections: Mapping[str, Bytes]) -> None:
        with contextlib.suppress(OSError):  # of this thread: the first requests go first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _only_writer(self._folder) as is_alone:
                if is_alone:
                    self._write(isa, sections)
        except OSError as error:
            log.warning(
                "packed weights cannot be kept in %s: %s. Nothing else is wrong, but the next start packs them again; "
                "--pack-cache names another folder, or is off",
                self._folder,
                error.strerror or error,
            )

    def _write(self, isa: str, sections: Mapping[str, Bytes]) -> None:
        content = content_hash(self._paths)
        if source_files(self._paths) != self._files:
            return  # changed since: nobody knows what was packed
        files = [_settled(file, self._seen_ns) for file in self._files]
        header = Header(_layout(isa), str(self._model), files, content, place(sections))
        path = self._path(isa)
        if not _make_room(path, header.data_bytes(), self._max_bytes):
            log.info("packed weights are not kept: %d bytes, see --pack-cache-bytes", header.data_bytes())
            return
        fd, name = tempfile.mkstemp(prefix="partial-", dir=self._folder)
        partial = Path(name)
        try:
            for _ in write(fd, header, sections):
                if self._stop.is_set():
                    return
            os.fsync(fd)  # before the name: after a power cut a named file must not hold zeros
            partial.replace(path)
        finally:
            os.close(fd)
            partial.unlink(missing_ok=True)  # what did not get its name


def forget(folder: Path, models: Path) -> int:
    """Removes the packed weights of models at `models` or below it; gives their bytes. Raises OSError."""
    freed = 0
    for path in folder.glob("*.pack"):
        with path.open("rb") as file:
            try:
                model = Path(read_header(file.fileno())[0].model)
            except PackFileError:
                continue
        if model.is_relative_to(models):
            freed += path.stat().st_size
            path.unlink()
    return freed


def _layout(isa: str) -> str:
    return f"{_C.PACK_VERSION} {isa}"


def _size(sections: Mapping[str, Bytes]) -> int:
    return sum(data.nbytes for data in sections.values())


def _read(pool: _C.Pool, place: tuple[int, int], header: Header, sections: Mapping[str, Bytes]) -> set[str]:
    """Fills what the file at `place` (descriptor, begin of the data) has; gives the names that are right."""
    fd, begin = place
    found = [
        section
        for section in header.sections
        if section.name in sections and sections[section.name].nbytes == section.nbytes
    ]
    sound = _C.read_sections(
        pool,
        fd,
        [sections[section.name] for section in found],
        [begin + section.offset for section in found],
        [section.sums for section in found],
    )
    return {section.name for section, is_sound in zip(found, sound, strict=True) if is_sound}


def _mark_used(path: Path) -> None:
    with contextlib.suppress(OSError):  # a read-only folder is read all the same
        os.utime(path)


def _settled(file: SourceFile, seen_ns: int) -> SourceFile:
    """The file as seen; one that had just been written with no time, so that it is hashed the next time.

    A write within the same tick of the file system's clock would leave the times as they are.
    """
    is_settled = max(file.mtime_ns, file.ctime_ns) < seen_ns - _SETTLED_NS
    return file if is_settled else SourceFile(file.name, file.size, 0, 0, file.inode)


@contextlib.contextmanager
def _only_writer(folder: Path) -> Iterator[bool]:
    """Whether nobody else writes in `folder`; then what killed writers left is removed. Raises OSError."""
    with (folder / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        for leftover in folder.glob("partial-*"):
            leftover.unlink(missing_ok=True)
        yield True


def _make_room(path: Path, nbytes: int, max_bytes: int) -> bool:
    """Removes the least recently used of the other files until `nbytes` more fit. False when they never can."""
    if nbytes > max_bytes:
        return False
    others = [(other.stat(), other) for other in path.parent.glob("*.pack") if other != path]
    others.sort(key=lambda entry: entry[0].st_mtime_ns)
    total = sum(stat.st_size for stat, _ in others)
    for stat, other in others:
        if total + nbytes <= max_bytes:
            break
        other.unlink(missing_ok=True)
        total -= stat.st_size
    return True
