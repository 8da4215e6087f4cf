"""ModelConfig: the numbers that a graph builder needs, whatever file they came from."""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.base.errors import ModelFileError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float = 1.0  # cos and sin are multiplied by it
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """The temperature of YaRN (Peng et al. 2023, arXiv:2309.00071), section 3.4: 0.1 * mscale * ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def as_float32(value: float) -> float:
    """The nearest float32."""
    nearest: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return nearest


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only text model. Sizes are counts, not bytes."""

    family: str  # "llama", "mistral", "qwen2", "qwen3", "gemma3"
    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    rms_norm_eps: float
    rope_base: float
    rope_scaling: RopeScaling = RopeScaling()
    rope_base_local: float = 0.0  # Gemma 3: base of the sliding-window layers; 0 elsewhere
    sliding_window: int = 0
    window_pattern: tuple[bool, ...] = ()  # per layer: True where the layer is windowed; empty: none is
    attention_scale: float = 0.0  # 0: head_dim ** -0.5
    attn_logit_softcap: float = 0.0
    final_logit_softcap: float = 0.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qk_norm: bool = False
    qkv_bias: bool = False
    sandwich_norms: bool = False  # Gemma: norms after attention and after the MLP too
    embedding_scale: float = 1.0
    norm_add_one: bool = False  # gains are stored as (gain - 1): Gemma in Hugging Face files
    tie_word_embeddings: bool = False
    rope_factors: tuple[float, ...] = ()  # per-frequency divisors stored as a tensor (GGUF rope_freqs.weight)
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None


# Most that a count may be before the file is called corrupt: far above any real model, far below what could hurt.
_LIMITS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_layers": 1024,
    "num_heads": 4096,
    "num_kv_heads": 4096,
    "head_dim": 1 << 14,
    "intermediate_size": 1 << 22,
    "max_position": 1 << 30,
}


def check_config(path: Path, config: ModelConfig) -> ModelConfig:
    """Return `config` when its numbers fit together, else raise ModelFileError naming the field."""

    def fail(field: str, problem: str) -> ModelFileError:
        return ModelFileError(path, field, problem)

    for field, limit in _LIMITS.items():
        value = getattr(config, field)
        if not 0 < value <= limit:
            raise fail(field, f"is {value}, not in 1..{limit}")
    if config.num_heads % config.num_kv_heads:
        raise fail("num_kv_heads", f"is {config.num_kv_heads}, which does not divide {config.num_heads} heads")
    if config.head_dim % 2:
        raise fail("head_dim", f"is {config.head_dim}; rotary positions need an even number")
    if not 0 < config.rms_norm_eps < 1:
        raise fail("rms_norm_eps", f"is {config.rms_norm_eps}, not between 0 and 1")
    if not 1 < config.rope_base < 1e12:
        raise fail("rope_base", f"is {config.rope_base}, not between 1 and 1e12")
    if any(config.window_pattern):
        if not 0 < config.sliding_window <= 1 << 30:
            raise fail("sliding_window", f"is {config.sliding_window} although some layers are windowed")
        if config.rope_base_local and not 1 < config.rope_base_local < 1e12:
            raise fail("rope_base_local", f"is {config.rope_base_local}, not between 1 and 1e12")
    if config.window_pattern and len(config.window_pattern) != config.num_layers:
        raise fail("window_pattern", f"names {len(config.window_pattern)} layers of {config.num_layers}")
    for field in ("attention_scale", "attn_logit_softcap", "final_logit_softcap", "embedding_scale"):
        value = getattr(config, field)
        if not (math.isfinite(value) and 0 <= value < 1e6):
            raise fail(field, f"is {value}, not a sensible factor")
    for token_id in config.eos_token_ids:
        if not 0 <= token_id < config.vocab_size:
            raise fail("eos_token_ids", f"holds {token_id}, outside the vocabulary of {config.vocab_size}")
    if config.bos_token_id is not None and not 0 <= config.bos_token_id < config.vocab_size:
        raise fail("bos_token_id", f"is {config.bos_token_id}, outside the vocabulary of {config.vocab_size}")
    _check_scaling(path, config)
    return config


def _check_scaling(path: Path, config: ModelConfig) -> None:
    scaling = config.rope_scaling
    if scaling.kind != "none" and not 1e-3 <= scaling.factor <= 1e6:
        raise ModelFileError(path, "rope_scaling.factor", f"is {scaling.factor}, not a sensible factor")
    if scaling.kind in ("llama3", "yarn"):
        if not 0 < scaling.original_max_position <= 1 << 30:
            problem = f"is {scaling.original_max_position}; {scaling.kind} scaling needs the trained context"
            raise ModelFileError(path, "rope_scaling.original_max_position", problem)
        if not 1e-3 <= scaling.attention_factor <= 100:
            raise ModelFileError(path, "rope_scaling.attention_factor", f"is {scaling.attention_factor}")
    if scaling.kind == "llama3" and not 1e-3 <= scaling.low_freq_factor < scaling.high_freq_factor <= 1e6:
        problem = f"{scaling.low_freq_factor} is not below high_freq_factor {scaling.high_freq_factor}"
        raise ModelFileError(path, "rope_scaling.low_freq_factor", problem)
    if scaling.kind == "yarn" and not 1e-3 <= scaling.beta_slow <= scaling.beta_fast <= 1e6:
        problem = f"{scaling.beta_slow} is not below beta_fast {scaling.beta_fast}"
        raise ModelFileError(path, "rope_scaling.beta_slow", problem)
    if config.rope_factors:
        if len(config.rope_factors) != config.head_dim // 2:
            problem = f"has {len(config.rope_factors)} values, the heads have {config.head_dim // 2} frequencies"
            raise ModelFileError(path, "rope_freqs.weight", problem)
        if not all(1e-3 <= factor <= 1e6 for factor in config.rope_factors):
            raise ModelFileError(path, "rope_freqs.weight", "holds a divisor outside 0.001 to 1e6")
