"""Checkpoints written as GGUF are the same models, for every family; what GGUF cannot say is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import convert, llama_metadata, llama_tensors, write_gguf

from headrace.base.errors import ExportError, ModelFileError
from headrace.model.checkpoint import FileCheckpoint, half_split_rows, interleaved_rows, open_checkpoint
from headrace.model.decoder import build_graph
from headrace.model.gguf import GGUFFile
from headrace.model.gguf_export import Target, export
from headrace.model.numpy_executor import NumpyExecutor

TINY = Path(__file__).parents[1] / "data" / "tiny"
MODELS = ("smollm2", "llama2", "llama3", "llama_yarn", "mistral", "qwen2", "qwen3", "gemma3")


def folder_of(model: str, tmp_path: Path, **changes: object) -> Path:
    """A tiny model with another configuration."""
    folder = Path(shutil.copytree(TINY / model, tmp_path / model))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def source_of(model: str, tmp_path: Path) -> FileCheckpoint:
    # GGUF has no key for Gemma's query scale: the family's rule is the head dimension.
    changes = {"query_pre_attn_scalar": 32} if model == "gemma3" else {}
    return open_checkpoint(folder_of(model, tmp_path, **changes))


def write(source: FileCheckpoint, path: Path, fmt: str, head: str = "") -> FileCheckpoint:
    export(source, Target(path, fmt, head or fmt, threads=2), {}, dict)
    return open_checkpoint(path)


def logits(checkpoint: FileCheckpoint) -> np.ndarray:
    ids = np.random.default_rng(3).integers(0, checkpoint.config.vocab_size, 80).tolist()
    return NumpyExecutor(build_graph(checkpoint.config, checkpoint), checkpoint).logits(ids)


@pytest.mark.parametrize("model", MODELS)
def test_every_family_as_floats_gives_the_same_logits(tmp_path: Path, model: str) -> None:
    source = source_of(model, tmp_path)
    np.testing.assert_allclose(logits(write(source, tmp_path / "m.gguf", "F32")), logits(source), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_tensors_are_those_of_a_converter_that_is_not_ours(tmp_path: Path, model: str) -> None:
    source = source_of(model, tmp_path)
    write(source, tmp_path / "m.gguf", "F32")
    ours, theirs = GGUFFile(tmp_path / "m.gguf"), GGUFFile(convert(source, tmp_path / "other.gguf"))
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, info in theirs.tensors.items():
        assert ours.tensors[name].shape == info.shape
        np.testing.assert_allclose(
            ours.read(name).view(np.float32), theirs.read(name).view(np.float32), rtol=1e-6, err_msg=name
        )
    for key, value in theirs.metadata.items():
        if key.startswith(("llama.", "qwen", "gemma")) and value:
            assert ours.metadata[key] == pytest.approx(value), key


@pytest.mark.parametrize(
    ("fmt", "limit"), [("Q8_0", 0.03), ("Q5_1", 0.15), ("Q5_0", 0.15), ("Q4_1", 0.3), ("Q4_0", 0.3)]
)
def test_fewer_bits_stay_near_and_only_matrices_get_them(tmp_path: Path, fmt: str, limit: float) -> None:
    source = source_of("qwen2", tmp_path)
    written = write(source, tmp_path / "m.gguf", fmt, "Q8_0")
    exact, found = logits(source), logits(written)
    assert np.abs(found - exact).mean() < limit * exact.std()
    assert not np.array_equal(found, exact)
    formats = {name: info.format for name, info in GGUFFile(tmp_path / "m.gguf").tensors.items()}
    assert formats.pop("token_embd.weight") == formats.pop("output.weight") == "Q8_0"
    for name, stored in formats.items():
        assert stored == ("F32" if "norm" in name or "bias" in name else fmt)


def test_a_gguf_file_keeps_its_metadata(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", "llama", llama_metadata(my__key=5), llama_tensors())
    source = open_checkpoint(path)
    written = write(source, tmp_path / "b.gguf", "F16")
    assert written.metadata["my.key"] == 5
    assert list(written.metadata["tokenizer.ggml.tokens"]) == list(source.metadata["tokenizer.ggml.tokens"])
    assert written.metadata["tokenizer.ggml.token_type"].typecode == "i"
    assert (written.metadata["general.file_type"], source.metadata.get("general.file_type")) == (1, None)
    np.testing.assert_allclose(logits(written), logits(source), atol=0.1)


def test_rows_that_are_no_whole_blocks_stay_floats(tmp_path: Path) -> None:
    """Rows of 16 and 24 values."""
    source = open_checkpoint(write_gguf(tmp_path / "a.gguf", "llama", llama_metadata(), llama_tensors()))
    write(source, tmp_path / "b.gguf", "Q4_0")
    assert {info.format for info in GGUFFile(tmp_path / "b.gguf").tensors.values()} == {"F32"}


def test_sampling_defaults_go_along(tmp_path: Path) -> None:
    folder = folder_of("llama3", tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "do_sample": true}')
    written = write(open_checkpoint(folder), tmp_path / "m.gguf", "Q8_0")
    assert written.metadata["general.sampling.temp"] == pytest.approx(0.6)
    assert written.metadata["general.sampling.top_k"] == 20
    assert "general.sampling.top_p" not in written.metadata


def test_what_gguf_cannot_say_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    folder = folder_of("gemma3", tmp_path, query_pre_attn_scalar=24)
    with pytest.raises(ExportError, match=r"cannot express this gemma3 model: blk\.0\.attention, scale would be 0\.17"):
        write(open_checkpoint(folder), tmp_path / "m.gguf", "F32")
    layers = ["full_attention", "sliding_attention"]
    folder = folder_of("qwen2", tmp_path, use_sliding_window=True, sliding_window=16, layer_types=layers)
    with pytest.raises(ExportError, match="a GGUF file cannot express this qwen2 model"):
        write(open_checkpoint(folder), tmp_path / "m.gguf", "F32")
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".*"))


def test_quantised_weights_are_not_quantised_again(tmp_path: Path) -> None:
    once = write(source_of("llama2", tmp_path), tmp_path / "a.gguf", "Q8_0")
    with pytest.raises(ModelFileError, match="already stored as Q8_0; quantising twice loses twice"):
        write(once, tmp_path / "b.gguf", "Q4_0")
    np.testing.assert_array_equal(logits(write(once, tmp_path / "c.gguf", "F32")), logits(once))


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["blk.0.ffn_up.weight"][3, 3] = np.nan
    source = open_checkpoint(write_gguf(tmp_path / "a.gguf", "llama", llama_metadata(), tensors))
    with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_up\.weight: holds a value that is not finite"):
        write(source, tmp_path / "b.gguf", "F16")
    assert not (tmp_path / "b.gguf").exists()


def test_rope_rows_there_and_back() -> None:
    rows = np.random.default_rng(0).integers(0, 255, (24, 5), np.uint8)
    np.testing.assert_array_equal(half_split_rows(interleaved_rows(rows, 3), 3), rows)
    assert not np.array_equal(interleaved_rows(rows, 3), rows)
