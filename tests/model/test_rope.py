"""Rotary frequencies: the scaling rules against their definitions. The goldens compare them with transformers."""

import math
from dataclasses import replace

import numpy as np
import pytest

from headrace.model.config import ModelConfig, RopeScaling
from headrace.model.rope import inverse_frequencies, rope_scale

BASE = ModelConfig(
    family="llama", name="m", vocab_size=8, hidden_size=64, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=64,
    intermediate_size=8, max_position=8192, rms_norm_eps=1e-5, rope_base=10000.0,
)  # fmt: skip


def test_unscaled_is_the_geometric_series_and_exact_float32() -> None:
    inv_freq = inverse_frequencies(BASE)
    assert len(inv_freq) == 32
    assert inv_freq[0] == 1.0
    np.testing.assert_allclose(inv_freq, 10000.0 ** -(np.arange(32) / 32), rtol=3e-7)
    assert all(float(np.float32(v)) == v for v in inv_freq)


def test_linear_divides_every_frequency() -> None:
    scaled = inverse_frequencies(replace(BASE, rope_scaling=RopeScaling(kind="linear", factor=4.0)))
    np.testing.assert_allclose(np.array(scaled) * 4, inverse_frequencies(BASE), rtol=2e-7)


def test_llama3_keeps_short_wavelengths_and_divides_long_ones() -> None:
    scaling = RopeScaling(kind="llama3", factor=8.0, original_max_position=1024)
    plain = np.array(inverse_frequencies(BASE))
    ratio = plain / np.array(inverse_frequencies(replace(BASE, rope_scaling=scaling)))
    wavelength = 2 * math.pi / plain
    np.testing.assert_allclose(ratio[wavelength < 1024 / 4], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[wavelength > 1024], 8, rtol=1e-6)
    between = (wavelength > 1024 / 4) & (wavelength < 1024)
    assert between.any()
    assert ((ratio[between] > 1) & (ratio[between] < 8)).all()
    assert (np.diff(ratio) >= -1e-6).all()


def test_yarn_ramps_from_kept_to_divided() -> None:
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_position=2048, attention_factor=1.25)
    config = replace(BASE, rope_scaling=scaling)
    ratio = np.array(inverse_frequencies(BASE)) / np.array(inverse_frequencies(config))
    rotations = 2048 * np.array(inverse_frequencies(BASE)) / (2 * math.pi)
    np.testing.assert_allclose(ratio[rotations > 32 * 1.4], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[rotations < 1 / 1.4], 4, rtol=1e-6)
    assert (np.diff(ratio) >= -1e-6).all()
    assert rope_scale(config) == 1.25
    assert rope_scale(BASE) == 1.0


def test_stored_divisors_apply() -> None:
    divisors = tuple(float(i + 1) for i in range(32))
    scaled = inverse_frequencies(replace(BASE, rope_factors=divisors))
    np.testing.assert_allclose(np.array(scaled) * divisors, inverse_frequencies(BASE), rtol=2e-7)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_local_layers_have_their_own_base_and_no_scaling(kind: str) -> None:
    scaling = RopeScaling(kind=kind, factor=8.0, original_max_position=512, attention_factor=1.5)  # type: ignore[arg-type]
    config = replace(BASE, rope_base=1e6, rope_base_local=10000.0, rope_scaling=scaling)
    assert inverse_frequencies(config, local=True) == inverse_frequencies(BASE)
    assert rope_scale(config, local=True) == 1.0
    assert inverse_frequencies(config) != inverse_frequencies(BASE)
