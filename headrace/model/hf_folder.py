"""A Hugging Face model folder: its JSON files, its safetensors files, and its tensors by canonical name."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.base.errors import ModelFileError
from headrace.model.config import ModelConfig
from headrace.model.json_file import read_object
from headrace.model.safetensors import SafetensorsFiles

_INDEX = "model.safetensors.index.json"

# Prefixes of the text model inside multimodal checkpoints (Gemma 3 4B and larger), longest first.
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
# Parts of a checkpoint that a text model does not need: the vision tower, and buffers that old versions stored.
_IGNORED = re.compile(
    r"(^|\.)(vision_tower|multi_modal_projector)\.|\.rotary_emb\.inv_freq$|\.self_attn\.(masked_bias|bias)$"
)
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)$")
_TOP = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# With sandwich norms the norm after attention is a norm of its own, not the one before the MLP.
_SANDWICH_PARTS = _PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass(frozen=True, slots=True)
class HFFolder:
    """`config` and `generation_config` are JSON objects as stored; the latter is empty when there is none."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    weights: SafetensorsFiles


def read_folder(path: Path) -> HFFolder:
    """Raises ModelFileError when config.json or the weights are missing or corrupt."""
    if not (path / "config.json").exists():
        raise ModelFileError(path, "config.json", "is missing: not a Hugging Face model folder")
    config = read_object(path / "config.json")
    generation_path = path / "generation_config.json"
    generation = read_object(generation_path) if generation_path.exists() else {}
    return HFFolder(config, generation, _open_weights(path))


def _open_weights(path: Path) -> SafetensorsFiles:
    if (path / "model.safetensors").exists():
        return SafetensorsFiles([path / "model.safetensors"])
    index_path = path / _INDEX
    if not index_path.exists():
        problem = "is missing; only safetensors weights are supported (model.safetensors, or shards with an index)"
        raise ModelFileError(path, "model.safetensors", problem)
    weight_map = read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(_is_file_name(v) for v in weight_map.values()):
        raise ModelFileError(index_path, "weight_map", "does not map tensor names to file names in this folder")
    shards = sorted(set(weight_map.values()))
    weights = SafetensorsFiles([path / shard for shard in shards])
    for name in weight_map:
        if name not in weights.tensors:
            raise ModelFileError(index_path, name, f"is not in {weight_map[name]}")
    return weights


def _is_file_name(value: Any) -> bool:
    """A shard lies in the folder itself: a name with a directory in it could point anywhere."""
    return isinstance(value, str) and value.endswith(".safetensors") and Path(value).name == value


def canonical_names(path: Path, weights: SafetensorsFiles, config: ModelConfig) -> dict[str, str]:
    """Canonical name -> stored name, for every tensor of the text model. Unknown tensors keep their own name."""
    names: dict[str, str] = {}
    for stored in weights.tensors:
        name = None if _IGNORED.search(stored) else _canonical(stored, config.sandwich_norms)
        if name is None or (name == "output.weight" and config.tie_word_embeddings):
            continue  # a tied head that is stored too is a copy of the embedding
        if name in names:
            raise ModelFileError(path, stored, f"names the same tensor as {names[name]}")
        names[name] = stored
    return names


def _canonical(stored: str, sandwich_norms: bool) -> str:
    name = next((stored[len(p) :] for p in _TEXT_PREFIXES if stored.startswith(p)), stored)
    if name in _TOP:
        return _TOP[name]
    match = _LAYER.match(name)
    part = (_SANDWICH_PARTS if sandwich_norms else _PARTS).get(match[2]) if match else None
    return f"blk.{int(match[1])}.{part}.{match[3]}" if match and part else stored
