"""Real GGUF files as float32 transformers models. Runs in the parity environment only.

transformers dequantises the file itself; `check_weights` then compares every parameter with what the `gguf` package
reads, mapped here by hand, so two implementations agree on each number before a golden is made.
"""

import re
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3_text": {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def load(path: Path) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def check_weights(model: transformers.PreTrainedModel, path: Path) -> int:
    """Compare all parameters with the file; returns how many. Raises ValueError at the first difference."""
    kind = model.config.model_type
    parameters = dict(model.named_parameters())
    seen = set()
    for tensor in gguf.GGUFReader(path).tensors:
        name, values = _hf_name(tensor.name, kind), gguf.dequantize(tensor.data, tensor.tensor_type)
        values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
            values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if kind == "gemma3_text" and "norm" in name:
            values = values - 1
        ours = parameters[name].detach().numpy()
        if ours.shape != values.shape or not np.allclose(ours, values, rtol=1e-6, atol=1e-7):
            raise ValueError(f"{path.name}: {tensor.name} is not {name} of the transformers model")
        seen.add(name)
    missing = parameters.keys() - seen
    if missing:
        raise ValueError(f"{path.name}: transformers has parameters that the file does not set: {sorted(missing)[:4]}")
    return len(seen)


def _hf_name(stored: str, kind: str) -> str:
    stem, suffix = stored.rsplit(".", 1)
    match = re.match(r"blk\.(\d+)\.(.+)$", stem)
    if match is None:
        return f"{_TOP[stem]}.{suffix}"
    return f"model.layers.{match[1]}.{(_PARTS | _NORMS[kind])[match[2]]}.{suffix}"


def perplexity(model: transformers.PreTrainedModel, ids: list[int]) -> float:
    """exp of the mean negative log-likelihood of ids[1:]: sane text gives tens, wrong weights thousands."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    return float(losses.exp())
