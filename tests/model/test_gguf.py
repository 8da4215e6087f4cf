"""The GGUF reader on sound files that the `gguf` package wrote."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_gguf import llama_metadata, llama_tensors, write_gguf

from headrace.base.errors import ModelFileError
from headrace.model.gguf import GGUFFile


def test_metadata_of_every_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 1 << 63)
    writer.add_int64("i64", -(1 << 62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "größe 水")
    writer.add_array("words", ["", "a", "水", "x" * 300])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    metadata = GGUFFile(tmp_path / "m.gguf").metadata
    scalars = {k: v for k, v in metadata.items() if isinstance(v, (int, float, str))}
    assert scalars == {
        "general.architecture": "llama", "u8": 200, "i8": -100, "u16": 60000, "i16": -30000, "u32": 4_000_000_000,
        "i32": -2_000_000_000, "u64": 1 << 63, "i64": -(1 << 62), "f32": 0.5, "f64": 0.1, "yes": True,
        "text": "größe 水",
    }  # fmt: skip
    assert scalars["yes"] is True
    words = metadata["words"]
    assert list(words) == ["", "a", "水", "x" * 300]
    assert (len(words), words[2], words[-1], words[1:3]) == (4, "水", "x" * 300, ["a", "水"])
    with pytest.raises(IndexError):
        words[4]
    assert metadata["numbers"].tolist() == [1, -2, 3]
    assert metadata["floats"].tolist() == [0.5, 1.5]
    assert metadata["flags"] == [True, False]


def test_tensors_are_read_only_views_with_rows(tmp_path: Path) -> None:
    tensors = llama_tensors()
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(), tensors))
    assert set(file.tensors) == set(tensors)
    for name, values in tensors.items():
        assert file.tensors[name].shape == values.shape
        data = file.read(name)
        assert data.shape == (values.size // values.shape[-1], values.shape[-1] * 4)
        assert not data.flags.writeable
        np.testing.assert_array_equal(data.reshape(-1).view(np.float32), values.reshape(-1))


def test_a_view_outlives_the_file_object(tmp_path: Path) -> None:
    tensors = llama_tensors()
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(), tensors))
    data = file.read("output_norm.weight")
    file.close()
    del file
    np.testing.assert_array_equal(data[0].view(np.float32), tensors["output_norm.weight"])


def test_alignment_and_version_two(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(general__alignment=64), llama_tensors())
    writer_data = bytearray(path.read_bytes())
    file = GGUFFile(path)
    assert (file.version, file.alignment) == (3, 64)
    writer_data[4] = 2  # versions 2 and 3 differ only in byte order support
    path.write_bytes(writer_data)
    assert GGUFFile(path).version == 2


def test_quantised_tensors_have_the_shape_of_their_values(tmp_path: Path) -> None:
    raw = np.random.default_rng(0).integers(0, 255, size=(3, 2 * 210), dtype=np.uint8)
    tensors = {"w": (raw, gguf.GGMLQuantizationType.Q6_K)}
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", {}, tensors))
    assert (file.tensors["w"].shape, file.tensors["w"].format) == ((3, 512), "Q6_K")
    np.testing.assert_array_equal(file.read("w"), raw)


def test_a_large_vocabulary_is_only_decoded_where_it_is_read(tmp_path: Path) -> None:
    words = [f"token {i}" for i in range(50_000)]
    path = write_gguf(tmp_path / "m.gguf", "llama", {"tokens": words}, {})
    data = path.read_bytes().replace(b"token 49999", b"token \xff9999")
    path.write_bytes(data)
    tokens = GGUFFile(path).metadata["tokens"]
    assert tokens[49_998] == "token 49998"
    with pytest.raises(ModelFileError, match="tokens: string 49999 is not UTF-8"):
        tokens[49_999]
    with pytest.raises(ModelFileError, match=r"tokens: .*UTF-8"):
        list(tokens)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        GGUFFile(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelFileError, match="is empty"):
        GGUFFile(tmp_path / "empty.gguf")
