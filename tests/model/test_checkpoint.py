"""Checkpoints: weights by canonical name, exact transforms, and the same model from both formats."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_gguf import convert, interleave, llama_metadata, llama_tensors, write_gguf

from headrace.model.checkpoint import FileCheckpoint, half_split_rows, open_checkpoint
from headrace.model.decoder import build_graph
from headrace.model.graph import Op, WeightRef
from headrace.model.quantize import dequantize

TINY = Path(__file__).parents[1] / "data" / "tiny"
MODELS = ("smollm2", "llama2", "llama3", "llama_yarn", "mistral", "qwen2", "qwen3", "gemma3")


def values(checkpoint: FileCheckpoint, ref: WeightRef) -> np.ndarray:
    weight = checkpoint.weight(ref)
    return dequantize(weight.data, weight.format).reshape(weight.shape)


def references(op: Op) -> list[WeightRef]:
    return [*op.weights, *([op.bias] if op.bias else [])]


@pytest.mark.parametrize("model", MODELS)
def test_a_folder_and_its_gguf_conversion_are_the_same_model(tmp_path: Path, model: str) -> None:
    folder = open_checkpoint(TINY / model)
    file = open_checkpoint(convert(folder, tmp_path / "m.gguf"))
    assert (folder.format, file.format) == ("safetensors", "gguf")
    graphs = [build_graph(c.config, c) for c in (folder, file)]
    assert graphs[0].kv_groups == graphs[1].kv_groups
    assert len(graphs[0].ops) == len(graphs[1].ops)
    for ours, theirs in zip(graphs[0].ops, graphs[1].ops, strict=True):
        assert (ours.kind, ours.inputs, ours.output) == (theirs.kind, theirs.inputs, theirs.output)
        for a, b in zip(references(ours), references(theirs), strict=True):
            np.testing.assert_allclose(values(folder, a), values(file, b), rtol=1e-6, atol=1e-6)
        if ours.kind == "rope":
            np.testing.assert_allclose(ours.attrs["inv_freq"], theirs.attrs["inv_freq"], rtol=1e-6)
        if ours.kind == "attention":
            # Gemma's query scale is not in GGUF metadata: the family's rule applies, which this model breaks.
            skip = {"scale"} if model == "gemma3" else set()
            assert {k: v for k, v in ours.attrs.items() if k not in skip} == {
                k: v for k, v in theirs.attrs.items() if k not in skip
            }


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "F32"])
def test_permuting_stored_rows_is_permuting_values(tmp_path: Path, kind: str) -> None:
    """Exactly, for every format: whole rows move."""
    half_split = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    quant = gguf.GGMLQuantizationType[kind]
    tensors = llama_tensors() | {
        "token_embd.weight": np.zeros((6, 64), dtype=np.float32),
        "blk.0.attn_q.weight": (gguf.quantize(interleave(half_split, 4), quant), quant),
    }
    changes = {"llama__embedding_length": 64, "llama__attention__head_count": 4, "llama__attention__head_count_kv": 4}
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(**changes), tensors)
    checkpoint = open_checkpoint(path)
    ref = checkpoint.ref("blk.0.attn_q.weight", (64, 64))
    assert ref == WeightRef("blk.0.attn_q.weight", "rope_permute:4", kind)
    expected = gguf.dequantize(gguf.quantize(half_split, quant), quant).reshape(64, 64)
    np.testing.assert_array_equal(values(checkpoint, ref), expected)


def test_half_split_rows_of_two_heads_of_four() -> None:
    stored = np.array([[0], [10], [1], [11], [100], [110], [101], [111]], dtype=np.uint8)
    assert half_split_rows(stored, 2).ravel().tolist() == [0, 1, 10, 11, 100, 101, 110, 111]


def test_matrices_are_views_and_vectors_are_float32() -> None:
    checkpoint = open_checkpoint(TINY / "qwen2")
    matrix = checkpoint.weight(checkpoint.ref("blk.0.attn_q.weight", (64, 64)))
    assert (matrix.format, matrix.data.shape, matrix.data.flags.writeable) == ("BF16", (64, 128), False)
    bias = checkpoint.weight(checkpoint.ref("blk.0.attn_q.bias", (64,)))
    assert (bias.format, bias.shape, bias.data.shape) == ("F32", (64,), (1, 256))


def test_tensors_stay_readable_when_their_pages_are_released(tmp_path: Path) -> None:
    folder = open_checkpoint(TINY / "qwen2")
    for checkpoint in (folder, open_checkpoint(convert(folder, tmp_path / "m.gguf"))):
        matrix = checkpoint.weight(checkpoint.ref("blk.0.attn_q.weight", (64, 64)))
        before = matrix.data.tobytes()
        checkpoint.release_pages()
        assert matrix.data.tobytes() == before


def test_gemma_gains_get_their_one_back() -> None:
    checkpoint = open_checkpoint(TINY / "gemma3")
    ref = checkpoint.ref("blk.0.attn_norm.weight", (64,))
    assert ref.transform == "add_one"
    plain = values(checkpoint, WeightRef(ref.name))
    np.testing.assert_array_equal(values(checkpoint, ref), plain + 1)
    assert checkpoint.ref("blk.0.attn_q.weight", (128, 64)).transform == ""


def test_text_sources() -> None:
    folder = open_checkpoint(TINY / "qwen2")
    assert folder.path == TINY / "qwen2"
    assert folder.metadata["config"]["model_type"] == "qwen2"
    assert folder.metadata["generation_config"]["eos_token_id"] == 2
    assert folder.config.eos_token_ids == (2,)


def test_names_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """The vision tower is left out, the text model's prefixes are taken off."""
    from headrace.model.hf_folder import canonical_names

    class Stub:
        tensors = dict.fromkeys(
            (
                "language_model.model.embed_tokens.weight",
                "language_model.model.layers.3.post_attention_layernorm.weight",
                "model.language_model.layers.3.pre_feedforward_layernorm.weight",
                "language_model.model.norm.weight",
                "language_model.lm_head.weight",
                "vision_tower.vision_model.encoder.layers.0.layer_norm1.weight",
                "model.vision_tower.post_layernorm.weight",
                "multi_modal_projector.mm_soft_emb_norm.weight",
            )
        )

    config = open_checkpoint(TINY / "gemma3").config
    assert set(canonical_names(tmp_path, Stub(), config)) == {  # type: ignore[arg-type]
        "token_embd.weight",
        "blk.3.post_attention_norm.weight",
        "blk.3.ffn_norm.weight",
        "output_norm.weight",
    }
