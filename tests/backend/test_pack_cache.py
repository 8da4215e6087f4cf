"""The cache of packed weights: the same bits as packing, whatever happened to the file, the model or the disk."""

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver import TOP, Driver, random_prompt, tiny_backend
from tiny_model import CONFIG, TinyCheckpoint

from headrace import _C
from headrace.backend import pack_file
from headrace.backend.cpu import CpuBackend
from headrace.backend.pack_cache import PackCache, forget
from headrace.core.request import SamplingParams
from headrace.model.checkpoint import Weight
from headrace.model.graph import WeightRef

_LONG_AGO_NS = 1_000_000_000_000_000_000
_FORMATS = {"attn": "Q4_1", "gate": "Q8_0", "up": "Q5_0", "down": "Q4_K", "output.": "Q6_K"}


class Counted(TinyCheckpoint):
    """Knows which matrices were read, so which were packed and not restored."""

    def __init__(self) -> None:
        super().__init__(CONFIG, lambda name: next((f for part, f in _FORMATS.items() if part in name), "BF16"))
        self.read: set[str] = set()

    def weight(self, ref: WeightRef) -> Weight:
        if "norm" not in ref.name and "embd" not in ref.name:
            self.read.add(ref.name)
        return super().weight(ref)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Stands for the model file, which has not been touched for a long time."""
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(range(256)) * 40)
    os.utime(path, ns=(_LONG_AGO_NS, _LONG_AGO_NS))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "packed"


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that the test has just made count as old: their ctime cannot be set."""
    monkeypatch.setattr("headrace.backend.pack_cache._SETTLED_NS", -(1 << 62))


def load(folder: Path, model: Path, isa: str = "auto", max_bytes: int = 1 << 30) -> tuple[Counted, CpuBackend]:
    """A backend over the tiny model; what it had to write is on disk."""
    checkpoint, cache = Counted(), PackCache(folder, model, max_bytes, min_bytes=0)
    backend = tiny_backend(checkpoint, isa=isa, threads=2, cache=cache)
    cache.wait()
    return checkpoint, backend


def the_file(folder: Path) -> Path:
    (path,) = folder.glob("*.pack")
    return path


def answer(backend: CpuBackend) -> tuple[list[int], list[bytes]]:
    driver = Driver(backend)
    sequence = driver.sequence(random_prompt(40, 333, 1), 64, SamplingParams(max_tokens=64, logprobs=TOP))
    driver.step([(sequence, 40)])
    for _ in range(4):
        driver.step([(sequence, 1)])
    return sequence.tokens, sequence.rows


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], list[bytes]]:
    """What the tiny model answers without a cache."""
    return answer(tiny_backend(Counted(), threads=2))


def test_the_second_start_packs_nothing_and_gives_the_same_bits(
    folder: Path, model: Path, expected: tuple[list[int], list[bytes]]
) -> None:
    first, backend = load(folder, model)
    assert first.read
    assert answer(backend) == expected
    second, backend = load(folder, model)
    assert not second.read
    assert answer(backend) == expected


@pytest.mark.parametrize("isa", _C.instruction_sets())
def test_each_instruction_set_has_a_file_of_its_own(folder: Path, model: Path, isa: str) -> None:
    for name in _C.instruction_sets():
        load(folder, model, name)
    assert len(list(folder.glob("*.pack"))) == len(_C.instruction_sets())
    again, backend = load(folder, model, isa)
    assert not again.read
    assert answer(backend) == answer(tiny_backend(Counted(), isa=isa, threads=2))


def test_a_changed_byte_anywhere_is_found_and_only_its_section_packed(
    folder: Path, model: Path, expected: tuple[list[int], list[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    load(folder, model)
    path = the_file(folder)
    sound = path.read_bytes()
    with path.open("rb") as file:
        header, begin = pack_file.read_header(file.fileno())
    assert len(header.sections) > 4
    for section in header.sections:
        spoiled = bytearray(sound)
        spoiled[begin + section.offset + section.nbytes - 1] ^= 1
        path.write_bytes(spoiled)
        checkpoint, backend = load(folder, model)
        assert checkpoint.read
        assert all(name in section.name for name in checkpoint.read)
        assert answer(backend) == expected
        assert "1 of" in caplog.text
        caplog.clear()
    assert path.read_bytes() == sound  # written anew each time


@pytest.mark.parametrize("at", [0, 7, 20, 60, 300])
def test_a_damaged_head_is_found(
    folder: Path, model: Path, at: int, expected: tuple[list[int], list[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    load(folder, model)
    spoiled = bytearray(the_file(folder).read_bytes())
    spoiled[at] ^= 0x40
    the_file(folder).write_bytes(spoiled)
    checkpoint, backend = load(folder, model)
    assert checkpoint.read
    assert answer(backend) == expected
    assert "packed anew" in caplog.text
    assert not load(folder, model)[0].read


@pytest.mark.parametrize("part", [0.0, 1e-3, 0.5, 0.999])
def test_a_truncated_file_is_found(
    folder: Path, model: Path, part: float, expected: tuple[list[int], list[bytes]]
) -> None:
    load(folder, model)
    os.truncate(the_file(folder), int(part * the_file(folder).stat().st_size))
    checkpoint, backend = load(folder, model)
    assert checkpoint.read
    assert answer(backend) == expected
    assert not load(folder, model)[0].read


def test_another_version_of_the_layouts_packs_anew(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(folder, model)
    old = the_file(folder)
    monkeypatch.setattr(_C, "PACK_VERSION", _C.PACK_VERSION + 1)
    assert load(folder, model)[0].read
    (new,) = set(folder.glob("*.pack")) - {old}
    old.replace(new)  # under the right name it is still of the wrong version
    assert load(folder, model)[0].read
    assert not load(folder, model)[0].read


def test_a_model_edited_in_place_under_its_old_time_packs_anew(folder: Path, model: Path) -> None:
    load(folder, model)
    with model.open("r+b") as file:
        file.seek(5000)
        file.write(b"X")
    os.utime(model, ns=(_LONG_AGO_NS, _LONG_AGO_NS))
    assert load(folder, model)[0].read
    assert not load(folder, model)[0].read


def test_a_model_only_touched_is_known_by_its_content_and_then_by_its_new_times(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(folder, model)
    model.touch()
    assert not load(folder, model)[0].read
    monkeypatch.setattr("headrace.backend.pack_cache.content_hash", lambda paths: "not asked for")
    assert not load(folder, model)[0].read


def test_a_model_that_was_just_written_is_hashed_at_the_next_start(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.backend.pack_cache._SETTLED_NS", 1 << 62)
    load(folder, model)
    monkeypatch.setattr("headrace.backend.pack_cache.content_hash", lambda paths: "something else")
    assert load(folder, model)[0].read


def test_a_model_that_changed_while_it_was_packed_is_not_kept(folder: Path, model: Path) -> None:
    cache = PackCache(folder, model, 1 << 30, min_bytes=0)
    model.touch()
    tiny_backend(Counted(), cache=cache)
    cache.wait()
    assert not list(folder.glob("*.pack"))


def test_a_model_that_changed_before_it_was_opened_is_not_served_from_the_cache(folder: Path, model: Path) -> None:
    load(folder, model)
    checkpoint, cache = Counted(), PackCache(folder, model, 1 << 30, min_bytes=0)
    model.write_bytes(b"another model")
    tiny_backend(checkpoint, cache=cache)
    cache.close()
    assert checkpoint.read


def test_a_folder_of_shards_is_known_by_all_of_them(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "hf"
    model.mkdir()
    for name in ("a.safetensors", "b.safetensors", "config.json"):
        (model / name).write_bytes(name.encode() * 100)
    load(folder, model)
    assert not load(folder, model)[0].read
    (model / "b.safetensors").write_bytes(b"x" * 100)
    assert load(folder, model)[0].read


def test_a_second_writer_leaves_the_first_alone(folder: Path, model: Path) -> None:
    folder.mkdir()
    with (folder / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        (folder / "partial-first").write_bytes(b"half")
        load(folder, model)
        assert [path.name for path in folder.glob("[!.]*")] == ["partial-first"]
    load(folder, model)  # the first is gone, and what it left too
    assert [path.suffix for path in folder.glob("[!.]*")] == [".pack"]


def test_many_that_load_at_once_all_get_the_same_weights(
    folder: Path, model: Path, expected: tuple[list[int], list[bytes]]
) -> None:
    caches = [PackCache(folder, model, 1 << 30, min_bytes=0) for _ in range(6)]
    backends = [tiny_backend(Counted(), cache=cache) for cache in caches]  # each may read while others write
    for cache, backend in zip(caches, backends, strict=True):
        cache.wait()
        assert answer(backend) == expected
    assert not load(folder, model)[0].read
    assert [path.suffix for path in folder.glob("[!.]*")] == [".pack"]


def test_a_folder_that_cannot_be_made_costs_a_warning(
    tmp_path: Path, model: Path, expected: tuple[list[int], list[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        _, backend = load(tmp_path / "file" / "packed", model)
        assert answer(backend) == expected
        assert "--pack-cache names another folder" in caplog.text
        caplog.clear()


def test_a_read_only_folder_is_read(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(folder, model)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr("headrace.backend.pack_cache._only_writer", refuse)
    assert not load(folder, model)[0].read


def test_a_full_disk_costs_a_warning_and_leaves_nothing(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(fd: int, data: memoryview, offset: int) -> int:
        if offset > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    load(folder, model)
    assert "No space left on device" in caplog.text
    assert not list(folder.glob("[!.]*"))


def test_the_least_recently_used_file_makes_room(folder: Path, model: Path, tmp_path: Path) -> None:
    load(folder, model)
    size = the_file(folder).stat().st_size
    others = [tmp_path / f"other{i}.gguf" for i in range(2)]
    files = {model: the_file(folder)}
    for other in others:
        other.write_bytes(other.name.encode())
        load(folder, other)
        (files[other],) = set(folder.glob("*.pack")) - set(files.values())
    for age, used in enumerate([others[0], model, others[1]]):
        os.utime(files[used], ns=(_LONG_AGO_NS + age, _LONG_AGO_NS + age))
    third = tmp_path / "third.gguf"
    third.write_bytes(b"third")
    load(folder, third, max_bytes=3 * size + 4096)
    assert [path.exists() for path in files.values()] == [True, False, True]
    assert not load(folder, third)[0].read


def test_what_is_larger_than_the_bound_removes_nothing(
    folder: Path, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(folder, model)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"other")
    with caplog.at_level(logging.INFO):
        load(folder, other, max_bytes=1000)
    assert "--pack-cache-bytes" in caplog.text
    assert the_file(folder)


def test_a_model_that_is_removed_takes_its_packed_weights_with_it(folder: Path, model: Path, tmp_path: Path) -> None:
    load(folder, model)
    other = tmp_path / "deeper" / "other.gguf"
    other.parent.mkdir()
    other.write_bytes(b"other")
    load(folder, other)
    (folder / "damaged.pack").write_bytes(b"damaged")
    sizes = sum(path.stat().st_size for path in folder.glob("*.pack"))
    freed = forget(folder, other.parent)
    assert freed == sizes - sum(path.stat().st_size for path in folder.glob("*.pack"))
    assert freed > 0
    assert not load(folder, model)[0].read
    assert load(folder, other)[0].read


def test_a_small_model_is_left_alone(folder: Path, model: Path) -> None:
    cache = PackCache(folder, model, 1 << 30)
    tiny_backend(Counted(), cache=cache)
    cache.wait()
    assert not folder.exists()


def test_closing_gives_up_what_is_being_written(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PackCache(folder, model, 1 << 30, min_bytes=0)

    def write_and_be_told_to_stop(*arguments: object) -> Iterator[None]:
        for _ in pack_file.write(*arguments):  # type: ignore[arg-type]
            cache._stop.set()
            yield

    monkeypatch.setattr("headrace.backend.pack_cache.write", write_and_be_told_to_stop)
    tiny_backend(Counted(), cache=cache).close()
    assert folder.exists()
    assert not list(folder.glob("[!.]*"))


_WRITES_FOR_EVER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_pack_cache import Counted, tiny_backend
from headrace.backend import pack_cache, pack_file

def write(*arguments):
    for number, _ in enumerate(pack_file.write(*arguments)):
        if number == 3:
            print("in the middle", flush=True)
            sys.stdin.read()
        yield

pack_cache.write = write
cache = pack_cache.PackCache(Path(sys.argv[2]), Path(sys.argv[3]), 1 << 30, min_bytes=0)
tiny_backend(Counted(), cache=cache)
cache.wait()
"""


def test_a_writer_killed_in_the_middle_leaves_nothing_that_is_read(
    folder: Path, model: Path, expected: tuple[list[int], list[bytes]]
) -> None:
    command = [sys.executable, "-c", _WRITES_FOR_EVER, str(Path(__file__).parent), str(folder), str(model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"in the middle\n"
        process.send_signal(signal.SIGKILL)
    (partial,) = folder.glob("[!.]*")
    assert partial.name.startswith("partial-")
    assert partial.stat().st_size > 0
    checkpoint, backend = load(folder, model)
    assert checkpoint.read
    assert answer(backend) == expected
    assert the_file(folder)
    assert not partial.exists()
