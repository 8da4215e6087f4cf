"""ModelConfig: the numbers that a graph builder needs, whatever file they came from."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeScaling:
    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


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
