"""GGUF files for tests, written by the `gguf` package: an implementation that is not ours."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from headrace.model.checkpoint import FileCheckpoint
from headrace.model.config import ModelConfig
from headrace.model.graph import WeightRef
from headrace.model.quantize import dequantize
from headrace.model.rope import inverse_frequencies

F32 = npt.NDArray[np.float32]


def write_gguf(path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> Path:
    """`metadata` values pick their GGUF type by Python type: int u32, float f32, bool, str, list. Arrays stay as given;
    a tensor may be a (raw bytes array, gguf type) pair."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, data in tensors.items():
        if isinstance(data, tuple):
            writer.add_tensor(name, data[0], raw_dtype=data[1])
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_metadata(**changes: Any) -> dict[str, Any]:
    """A one-layer Llama: 2 heads, 1 KV head of 8, hidden 16, MLP 24, vocabulary 6. A change to None drops the key."""
    values: dict[str, Any] = {
        "general.name": "tiny",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 16,
        "llama.feed_forward_length": 24,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "é", "<|im_end|>", "<|im_start|>", "ab"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 1],
        "tokenizer.ggml.eos_token_id": 0,
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in values.items() if value is not None}


def llama_tensors(seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    shapes = {
        "token_embd.weight": (6, 16),
        "output_norm.weight": (16,),
        "blk.0.attn_norm.weight": (16,),
        "blk.0.attn_q.weight": (16, 16),
        "blk.0.attn_k.weight": (8, 16),
        "blk.0.attn_v.weight": (8, 16),
        "blk.0.attn_output.weight": (16, 16),
        "blk.0.ffn_norm.weight": (16,),
        "blk.0.ffn_gate.weight": (24, 16),
        "blk.0.ffn_up.weight": (24, 16),
        "blk.0.ffn_down.weight": (16, 24),
    }
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def convert(folder: FileCheckpoint, path: Path) -> Path:
    """A Hugging Face checkpoint as llama.cpp's converter writes it: F32, q and k of Llama with interleaved rope pairs,
    Gemma's gains plus one, Llama 3 scaling as a tensor of divisors."""
    config, arch = folder.config, "llama" if folder.config.family == "mistral" else folder.config.family
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name in folder.names():
        transform = "add_one" if config.norm_add_one and "norm" in name else ""
        weight = folder.weight(WeightRef(name, transform))
        values = dequantize(weight.data, weight.format).reshape(weight.shape)
        if arch == "llama" and ".attn_q." in name:
            values = interleave(values, config.num_heads)
        if arch == "llama" and ".attn_k." in name:
            values = interleave(values, config.num_kv_heads)
        tensors[name] = values
    if config.rope_scaling.kind == "llama3":
        tensors["rope_freqs.weight"] = _divisors(config)
    return write_gguf(path, arch, _metadata(config, arch), tensors)


def interleave(values: F32, heads: int) -> F32:
    """Half-split rope rows to interleaved ones: row i of a head goes to 2i, row i + d/2 to 2i + 1."""
    per_head = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(per_head.swapaxes(1, 2)).reshape(values.shape)


def _divisors(config: ModelConfig) -> F32:
    exponent = np.arange(0, config.head_dim, 2) / config.head_dim
    return (config.rope_base**-exponent / np.array(inverse_frequencies(config))).astype(np.float32)


def _metadata(config: ModelConfig, arch: str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_base,
        "rope.dimension_count": config.head_dim,
    }
    if config.sliding_window:
        values["attention.sliding_window"] = config.sliding_window
    scaling = config.rope_scaling
    if scaling.kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
        values["rope.scaling.original_context_length"] = scaling.original_max_position
    return {f"{arch}.{key}": value for key, value in values.items()}
