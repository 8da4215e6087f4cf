"""The safetensors reader and Hugging Face folders: sound ones, and every way to be corrupt that we could think of."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.base.errors import ModelFileError
from headrace.model.checkpoint import open_checkpoint
from headrace.model.decoder import build_graph
from headrace.model.hf_folder import read_folder
from headrace.model.safetensors import SafetensorsFiles

TINY = Path(__file__).parents[1] / "data" / "tiny"
ENTRY: dict[str, Any] = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}


def encode(header: Any, data: int = 64, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + bytes(range(data))


def test_a_sound_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    other = {"dtype": "BF16", "shape": [16], "data_offsets": [32, 64]}
    path.write_bytes(encode({"__metadata__": {"format": "pt"}, "a": ENTRY, "b": other}))
    files = SafetensorsFiles([path])
    assert {t.name: (t.format, t.shape) for t in files.tensors.values()} == {"a": ("F32", (2, 4)), "b": ("BF16", (16,))}
    assert files.read("a").tolist() == [list(range(16)), list(range(16, 32))]
    assert files.read("b").tolist() == [list(range(32, 64))]
    assert not files.read("a").flags.writeable


CASES: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "file", "is empty"),
    "short": (b"\x00\x01", "header size", "too short"),
    "absurd header": (encode({}, size=1 << 60), "header size", "truncated or corrupt"),
    "header past the end": (encode({}, size=500), "header size", "truncated or corrupt"),
    "not json": (encode(b"{'a': 1}"), "header", "JSON"),
    "not text": (encode(b"\xff\xff"), "header", "JSON"),
    "deep json": (encode(b"[" * 200_000), "header", "JSON"),
    "huge number": (encode(b'{"a": ' + b"1" * 5000 + b"}"), "header", "JSON"),
    "a list": (encode([1]), "header", "not a JSON object"),
    "key twice": (encode(b'{"a": 1, "a": 2}'), "header", "twice"),
    "entry a number": (encode({"a": 1}), "a", "no dtype"),
    "entry incomplete": (encode({"a": {"dtype": "F32", "shape": [1]}}), "a", "no dtype"),
    "unknown dtype": (encode({"a": ENTRY | {"dtype": "F3"}}), "a", "unknown dtype"),
    "dtype a list": (encode({"a": ENTRY | {"dtype": ["F32"]}}), "a", "unknown dtype"),
    "negative dimension": (encode({"a": ENTRY | {"shape": [-2, -4]}}), "a", "bad shape"),
    "fractional dimension": (encode({"a": ENTRY | {"shape": [2.0, 4]}}), "a", "bad shape"),
    "boolean dimension": (encode({"a": ENTRY | {"shape": [True, 8]}}), "a", "bad shape"),
    "many dimensions": (encode({"a": ENTRY | {"shape": [1] * 2000}}), "a", "bad shape"),
    "absurd shape": (encode({"a": ENTRY | {"shape": [1 << 61, 1 << 61]}}), "a", "takes"),
    "shape and bytes differ": (encode({"a": ENTRY | {"shape": [2, 5]}}), "a", "takes 40 bytes"),
    "offsets swapped": (encode({"a": ENTRY | {"data_offsets": [32, 0]}}), "a", "hold -32"),
    "one offset": (encode({"a": ENTRY | {"data_offsets": [32]}}), "a", "bad data_offsets"),
    "offset past the end": (encode({"a": ENTRY | {"data_offsets": [64, 96]}}), "a", "truncated"),
    "overlap": (encode({"a": ENTRY, "b": ENTRY | {"data_offsets": [16, 48]}}), "b", "overlap those of a"),
}


@pytest.mark.parametrize("case", CASES)
def test_corrupt_file_names_itself_and_the_field(tmp_path: Path, case: str) -> None:
    data, field, words = CASES[case]
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelFileError) as caught:
        SafetensorsFiles([path])
    assert caught.value.field == field
    assert words in caught.value.problem
    assert str(path) in str(caught.value)


def copy(name: str, target: Path) -> Path:
    shutil.copytree(TINY / name, target, ignore=shutil.ignore_patterns("golden.npz"))
    return target


def read_everything(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for op in build_graph(checkpoint.config, checkpoint).ops:
        for ref in op.weights:
            checkpoint.weight(ref)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    folder = read_folder(TINY / "llama2")
    assert len({id(m) for m in folder.weights._maps.values()}) == 2
    read_everything(TINY / "llama2")


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "../other.safetensors"}, "file names in this folder"),
        ({"a": "/etc/passwd"}, "file names in this folder"),
        ({"a": 3}, "file names in this folder"),
        ([], "file names in this folder"),
        ({"a": "model-00003-of-00002.safetensors"}, "cannot be read"),
        ({"nothing": "model-00001-of-00002.safetensors"}, "is not in model-00001"),
    ],
)
def test_bad_index(tmp_path: Path, weight_map: Any, words: str) -> None:
    folder = copy("llama2", tmp_path / "m")
    edit(folder / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(ModelFileError, match=words):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = copy("llama2", tmp_path / "m")
    first = folder / "model-00001-of-00002.safetensors"
    shutil.copy(first, folder / "again.safetensors")
    index = folder / "model.safetensors.index.json"
    edit(index, weight_map=json.loads(index.read_text())["weight_map"] | {"x": "again.safetensors"})
    with pytest.raises(ModelFileError, match="is in another shard too"):
        open_checkpoint(folder)


def test_folders_without_their_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config.json: is missing"):
        open_checkpoint(tmp_path)
    folder = copy("smollm2", tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="only safetensors"):
        open_checkpoint(folder)
    with pytest.raises(ModelFileError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_dtype_that_cannot_be_computed_with(tmp_path: Path) -> None:
    folder = copy("smollm2", tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"I16" '))
    with pytest.raises(ModelFileError, match="is stored as I16; supported: F32"):
        read_everything(folder)


quick = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(draw=st.data())
def test_flipped_bytes_of_the_header(draw: st.DataObject, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    if not folder.exists():
        copy("smollm2", folder)
    sound = (TINY / "smollm2" / "model.safetensors").read_bytes()
    header = 8 + int(np.frombuffer(sound[:8], dtype="<u8")[0])
    data = bytearray(sound)
    for _ in range(draw.draw(st.integers(1, 3))):
        data[draw.draw(st.integers(0, header))] = draw.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(data)
    try:
        read_everything(folder)
    except ModelFileError as error:
        assert str(folder) in str(error)


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@quick
@given(draw=st.data(), model=st.sampled_from(["llama3", "llama_yarn", "gemma3", "qwen2", "mistral"]))
def test_config_values_of_any_kind(draw: st.DataObject, model: str, tmp_path: Path) -> None:
    folder = tmp_path / model
    if not folder.exists():
        copy(model, folder)
    config = json.loads((TINY / model / "config.json").read_text())
    target = config
    rope = [v for v in (config["rope_parameters"], *config["rope_parameters"].values()) if isinstance(v, dict)]
    if draw.draw(st.booleans()):
        target = draw.draw(st.sampled_from(rope))
    target[draw.draw(st.sampled_from(sorted(target)))] = draw.draw(values)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        read_everything(folder)
    except ModelFileError as error:
        assert str(folder) in str(error)
