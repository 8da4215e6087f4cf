"""A Hugging Face folder (config, tokenizer, bf16 safetensors) from a GGUF file of a Llama with a byte-level vocabulary.

Weights are dequantised and rounded to bf16; the rows of q and k, which GGUF interleaves, come back in halves.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.model.checkpoint import FileCheckpoint, open_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.gguf import GGUFFile
from headrace.model.quantize import dequantize
from headrace.text.byte_level import build_bpe
from headrace.text.gguf_vocab import GGUFVocab

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_folder(source: Path, folder: Path) -> None:
    """Raises ModelFileError when `source` is not a readable GGUF file."""
    checkpoint = open_checkpoint(source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "config.json", _config(checkpoint.config))
        _write_tokenizer(checkpoint, folder)
        _write_weights(checkpoint, folder / "model.safetensors")
    finally:
        checkpoint.close()


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; finite values only."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_base,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(checkpoint: FileCheckpoint, folder: Path) -> None:
    vocab = GGUFVocab.from_metadata(checkpoint.metadata, str(checkpoint.path))
    tokenizer = json.loads(build_bpe(vocab, str(checkpoint.path)).to_str())
    # The entry past the vocabulary that stands for bytes without a token is headrace's own; a checkpoint has none.
    model = tokenizer["model"]
    missing = model.pop("unk_token")
    model["unk_token"] = None
    del model["vocab"][missing]
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != missing]
    tokenizer["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    _write_json(folder / "tokenizer.json", tokenizer)
    named = {"bos_token": vocab.bos_token_id, "eos_token": vocab.eos_token_id, "unk_token": vocab.unknown_token_id}
    described: dict[str, Any] = {name: vocab.tokens[i] for name, i in named.items() if i is not None}
    described |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": bool(vocab.add_bos)}
    described |= {"model_max_length": checkpoint.config.max_position, "chat_template": vocab.chat_template}
    _write_json(folder / "tokenizer_config.json", described)


def _write_weights(checkpoint: FileCheckpoint, path: Path) -> None:
    """Tensor by tensor, so that one of them is in memory at a time."""
    file = GGUFFile(checkpoint.path)
    shapes = {name: file.tensors[name].shape for name in sorted(checkpoint.names())}
    file.close()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[_stored_name(name)] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in shapes.items():
            weight = checkpoint.weight(checkpoint.ref(name, shape))
            out.write(to_bf16(dequantize(weight.data, weight.format)).tobytes())


def _stored_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    if name == "output.weight":
        return "lm_head.weight"
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.{kind}"
