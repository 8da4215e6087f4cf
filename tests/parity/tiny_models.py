"""Tiny random checkpoints of each architecture, made by transformers. Runs in the parity environment only.

Every weight is drawn from a generator seeded by its name, large enough that logits spread and every part of the model
matters: biases and norm gains are far from 0 and 1, sequences are longer than the windows, positions longer than the
context that rope scaling starts from.
"""

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class TinyModel:
    name: str
    config: transformers.PreTrainedConfig
    dtype: torch.dtype  # of the stored weights; the goldens are computed in float32 from these values
    max_shard_size: str = "1GB"


def tiny_models() -> list[TinyModel]:
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    linear = {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}
    return [
        TinyModel(
            "smollm2",
            transformers.LlamaConfig(**_SIZES | {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96},
                                     head_dim=32, tie_word_embeddings=True, rope_theta=100000.0, rms_norm_eps=1e-5),
            torch.bfloat16,
        ),
        TinyModel("llama2", transformers.LlamaConfig(**_SIZES | {"num_key_value_heads": 4}, rms_norm_eps=1e-5),
                  torch.float16, max_shard_size="100KB"),
        TinyModel("llama3", transformers.LlamaConfig(**_SIZES, rope_parameters=llama3, rms_norm_eps=1e-5),
                  torch.bfloat16),
        TinyModel("llama_yarn", transformers.LlamaConfig(**_SIZES, rope_parameters=yarn, attention_bias=True),
                  torch.bfloat16),
        TinyModel("mistral", transformers.MistralConfig(**_SIZES, head_dim=32, sliding_window=20), torch.float32),
        TinyModel("qwen2", transformers.Qwen2Config(**_SIZES, rope_theta=1000000.0), torch.bfloat16),
        TinyModel("qwen3", transformers.Qwen3Config(**_SIZES, head_dim=32, tie_word_embeddings=True,
                                                    rope_theta=1000000.0), torch.bfloat16),
        TinyModel(
            "gemma3",
            transformers.Gemma3TextConfig(**_SIZES | {"num_hidden_layers": 7, "num_key_value_heads": 1}, head_dim=32,
                                          sliding_window=16, query_pre_attn_scalar=24,
                                          rope_parameters={"full_attention": linear,
                                                           "sliding_attention": {"rope_type": "default",
                                                                                 "rope_theta": 10000.0}}),
            torch.bfloat16,
        ),
    ]  # fmt: skip


def build(tiny: TinyModel) -> transformers.PreTrainedModel:
    """The model with its seeded weights, rounded to the dtype they are stored in, in float32."""
    model = transformers.AutoModelForCausalLM.from_config(tiny.config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = _draw(f"{tiny.name}/{name}", tuple(parameter.shape), tiny.config)
            parameter.copy_(values.to(tiny.dtype).float())
    return model.float().eval()


def _draw(seed_name: str, shape: tuple[int, ...], config: transformers.PreTrainedConfig) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(seed_name.encode()))
    values = torch.randn(shape, generator=generator)
    gemma = config.model_type == "gemma3_text"
    if "norm" in seed_name:
        return 0.3 * values if gemma else 1 + 0.3 * values  # Gemma stores the gain minus one
    if seed_name.endswith("bias"):
        return 0.5 * values
    if "embed_tokens" in seed_name:
        # A large tied embedding would make every token predict itself.
        return values * (0.02 if gemma else 0.15 if config.tie_word_embeddings else 1.0)
    return 1.5 * values / shape[-1] ** 0.5
