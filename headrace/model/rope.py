"""Rotary frequencies of a model: base, scaling rule and stored factors become one tuple of inverse frequencies.

Computed in float32 in the order that Hugging Face transformers uses, so that the same positions give the same angles.
Scaling rules: "linear" (position interpolation), "llama3" (Llama 3.1 frequency-dependent interpolation) and "yarn"
(Peng et al. 2023, arXiv:2309.00071, section 3).
"""

import math

import numpy as np
import numpy.typing as npt

from headrace.model.config import ModelConfig, RopeScaling

F32 = npt.NDArray[np.float32]


def inverse_frequencies(config: ModelConfig, *, local: bool = False) -> tuple[float, ...]:
    """head_dim / 2 values (exact float32): the angle of position p is p * inv_freq[i].

    `local` asks for the windowed layers of a model that has a base of their own; scaling never applies to those.
    """
    if local and config.rope_base_local:
        return _as_tuple(_unscaled(config.rope_base_local, config.head_dim))
    inv_freq: F32 = _unscaled(config.rope_base, config.head_dim)
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        inv_freq = np.divide(inv_freq, scaling.factor, dtype=np.float32)
    elif scaling.kind == "llama3":
        inv_freq = _llama3(inv_freq, scaling)
    elif scaling.kind == "yarn":
        inv_freq = _yarn(inv_freq, scaling, config.rope_base)
    if config.rope_factors:
        inv_freq = np.divide(inv_freq, np.asarray(config.rope_factors), dtype=np.float32)
    return _as_tuple(inv_freq)


def rope_scale(config: ModelConfig, *, local: bool = False) -> float:
    """What cos and sin are multiplied by: YaRN's attention factor, 1 elsewhere."""
    if config.rope_scaling.kind != "yarn" or (local and config.rope_base_local):
        return 1.0
    return config.rope_scaling.attention_factor


def rope_divisors(config: ModelConfig) -> tuple[float, ...]:
    """What a GGUF file stores per frequency of a model whose scaling has no metadata there; empty for any other.

    These are Llama 3's scaling, and divisors that came from such a file.
    """
    if config.rope_scaling.kind != "llama3":
        return config.rope_factors
    scaled = np.asarray(inverse_frequencies(config), dtype=np.float32)
    divisors: F32 = _unscaled(config.rope_base, config.head_dim) / scaled
    return _as_tuple(divisors)


def _unscaled(base: float, head_dim: int) -> F32:
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies: F32 = np.float32(1) / np.power(np.float32(base), exponent, dtype=np.float32)
    return frequencies


def _llama3(inv_freq: F32, scaling: RopeScaling) -> F32:
    """Long wavelengths are interpolated, short ones kept, those between blended."""
    context = scaling.original_max_position
    wavelength = np.float32(2 * math.pi) / inv_freq
    slow = wavelength > context / scaling.low_freq_factor
    fast = wavelength < context / scaling.high_freq_factor
    blend = (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    mixed = (1 - blend) * inv_freq / scaling.factor + blend * inv_freq
    return np.where(slow, inv_freq / scaling.factor, np.where(fast, inv_freq, mixed)).astype(np.float32)


def _yarn(inv_freq: F32, scaling: RopeScaling, base: float) -> F32:
    """Frequencies below `low` keep their value, those above `high` are interpolated, a ramp lies between."""
    dim = 2 * len(inv_freq)

    def dim_of(rotations: float) -> float:
        return dim * math.log(scaling.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dim_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_of(scaling.beta_slow)), dim - 1)
    span = high - low if high != low else 0.001
    keep = 1 - np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(span), 0, 1)
    blended: F32 = inv_freq / np.float32(scaling.factor) * (1 - keep) + inv_freq * keep
    return blended.astype(np.float32)


def _as_tuple(values: F32) -> tuple[float, ...]:
    return tuple(float(v) for v in values)
