"""The GGUF writer, read back by the gguf package and by our own reader."""

from array import array
from collections import namedtuple
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.base.errors import ExportError
from headrace.model.gguf import GGUFFile
from headrace.model.gguf_writer import GGUFWriter

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "text": "naïve \n",
    "yes": True,
    "count": 7,
    "below": -3,
    "large": 1 << 40,
    "factor": 0.5,
    "words": ["a", "", "ß"],
    "numbers": array("i", [1, -2]),
    "flags": [True, False],
    "scores": array("f", [0.25]),
}
TENSORS = {"b.weight": ("F32", (3,)), "a.weight": ("Q8_0", (2, 64)), "c.weight": ("BF16", (5, 7))}


def parts(name: str) -> list[np.ndarray]:
    rng = np.random.default_rng(len(name) + ord(name[0]))
    sizes = {"b.weight": [(1, 12)], "a.weight": [(1, 68), (1, 68)], "c.weight": [(2, 14), (3, 14)]}
    return [rng.integers(0, 128, size, np.uint8) for size in sizes[name]]


def write(path: Path, force: bool = False) -> Path:
    with GGUFWriter(path, METADATA, TENSORS, force) as writer:
        for name in ("a.weight", "b.weight", "c.weight"):  # in any order
            for part in parts(name):
                writer.append(name, part)
        writer.commit()
    return path


def test_values_and_tensors_come_back(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    ours = GGUFFile(path)
    assert ours.version == 3
    assert list(ours.tensors) == list(TENSORS)
    theirs = gguf.GGUFReader(path)
    kinds = {name: theirs.fields[name].types[0].name for name in METADATA}
    assert kinds["count"] == "UINT32" and kinds["large"] == "UINT64" and kinds["factor"] == "FLOAT32"
    assert kinds["below"] == "INT32" and kinds["yes"] == "BOOL"
    for key, value in METADATA.items():
        plain = value.tolist() if isinstance(value, array) else value
        assert theirs.fields[key].contents() == plain
        found = ours.metadata[key]
        assert (list(found) if isinstance(plain, list) else found) == plain
    for tensor in theirs.tensors:
        expected = np.concatenate(parts(tensor.name)).ravel()
        np.testing.assert_array_equal(tensor.data.view(np.uint8).ravel(), expected)
        np.testing.assert_array_equal(ours.read(tensor.name).ravel(), expected)


def test_a_file_that_exists_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("precious")
    with pytest.raises(ExportError, match="exists; give --force"):
        write(path)
    assert path.read_text() == "precious"
    write(path, force=True)
    assert GGUFFile(path).tensors


def test_an_interrupted_file_leaves_nothing_and_spoils_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("precious")
    with pytest.raises(KeyboardInterrupt), GGUFWriter(path, METADATA, TENSORS, force=True) as writer:
        assert set(GGUFFile(writer.temporary).tensors) == set(TENSORS)  # already a sound file
        writer.append("a.weight", parts("a.weight")[0])
        raise KeyboardInterrupt
    assert path.read_text() == "precious"
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(100, 99, 1_000))
    with pytest.raises(ExportError, match=r"its disk has 0 MB free; make room"):
        write(tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ExportError, match="No space left on device"):
        write(tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="is a folder"):
        write(tmp_path)
    with pytest.raises(ExportError, match="does not exist; create it"):
        write(tmp_path / "no" / "m.gguf")


def test_bytes_that_do_not_fit_the_description_are_a_defect(tmp_path: Path) -> None:
    with GGUFWriter(tmp_path / "m.gguf", METADATA, TENSORS, force=False) as writer:
        with pytest.raises(ValueError, match="fewer bytes"):
            writer.commit()
        with pytest.raises(ValueError, match="more bytes"):
            writer.append("b.weight", np.zeros((1, 13), np.uint8))
    assert list(tmp_path.iterdir()) == []
