"""A GGUF file in bf16 of Llama 3.2 1B's shape with random weights, for speed only.

The vocabulary is a byte-level one of another file, padded to the size wanted with words that no text merges into.
Every tensor is drawn from the seed and its own name's place, so that a file is the same each time.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from comparison.folder import to_bf16
from headrace.model.gguf import GGUFFile

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, MLP, VOCABULARY = 2048, 16, 32, 8, 64, 8192, 128_256
_DEVIATION = 0.02


def write_random_llama(path: Path, vocabulary: Path, seed: int = 0) -> None:
    """`vocabulary` is a GGUF file whose tokenizer is taken. Raises ModelFileError when it cannot be read."""
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    _add_metadata(writer)
    _add_tokenizer(writer, vocabulary)
    shapes = _shapes()
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
        else:
            size = 2 * shape[0] * shape[1]
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor_info(name, (shape[0], 2 * shape[1]), np.dtype(np.uint8), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for place, shape in enumerate(shapes.values()):
        if len(shape) == 1:
            writer.write_tensor_data(np.ones(shape, np.float32))
        else:
            values = np.random.default_rng((seed, place)).standard_normal(shape, np.float32) * np.float32(_DEVIATION)
            writer.write_tensor_data(to_bf16(values).view(np.uint8))
    writer.close()


def _shapes() -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HEADS * HEAD, HIDDEN),
        "attn_k": (KV_HEADS * HEAD, HIDDEN),
        "attn_v": (KV_HEADS * HEAD, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (MLP, HIDDEN),
        "ffn_up": (MLP, HIDDEN),
        "ffn_down": (HIDDEN, MLP),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for number in range(LAYERS):
        shapes |= {f"blk.{number}.{part}.weight": shape for part, shape in layer.items()}
    return shapes


def _add_metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_name("random-1b")
    writer.add_block_count(LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _add_tokenizer(writer: gguf.GGUFWriter, vocabulary: Path) -> None:
    file = GGUFFile(vocabulary)
    try:
        given: dict[str, Any] = {k: v for k, v in file.metadata.items() if k.startswith("tokenizer.")}
        tokens = list(given["tokenizer.ggml.tokens"])
        padding = [f"Ġpadding{i}" for i in range(len(tokens), VOCABULARY)]
        types = [int(kind) for kind in given["tokenizer.ggml.token_type"]] + [1] * len(padding)
        writer.add_tokenizer_model(given["tokenizer.ggml.model"])
        writer.add_tokenizer_pre(given["tokenizer.ggml.pre"])
        writer.add_token_list(tokens + padding)
        writer.add_token_types(types)
        writer.add_token_merges(list(given["tokenizer.ggml.merges"]))
        writer.add_bos_token_id(int(given["tokenizer.ggml.bos_token_id"]))
        writer.add_eos_token_id(int(given["tokenizer.ggml.eos_token_id"]))
        writer.add_add_bos_token(False)
        writer.add_add_space_prefix(False)
        writer.add_chat_template(given["tokenizer.chat_template"])
    finally:
        file.close()
