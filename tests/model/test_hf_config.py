"""ModelConfig from config.json: the families as their publishers write them, older and newer spellings, refusals."""

from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ModelFileError
from headrace.model.config import ModelConfig, RopeScaling
from headrace.model.hf_config import config_from_hf

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def read(generation: dict[str, Any] | None = None, **values: Any) -> ModelConfig:
    return config_from_hf(Path("models/some-model"), SIZES | values, generation or {})


def test_llama_two() -> None:
    config = read(model_type="llama", hidden_act="silu", bos_token_id=1, eos_token_id=2, rope_scaling=None)
    assert config == ModelConfig(
        family="llama", name="some-model", vocab_size=1000, hidden_size=128, num_layers=6, num_heads=8, num_kv_heads=2,
        head_dim=16, intermediate_size=256, max_position=4096, rms_norm_eps=1e-5, rope_base=10000.0,
        eos_token_ids=(2,), bos_token_id=1,
    )  # fmt: skip


@pytest.mark.parametrize("spelling", ["old", "new"])
def test_llama_three_scaling_in_both_spellings(spelling: str) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    values: dict[str, Any] = {"rope_theta": 500000.0, "rope_scaling": scaling}
    if spelling == "new":
        values = {"rope_parameters": scaling | {"rope_theta": 500000.0}}
    config = read(model_type="llama", **values)
    assert config.rope_base == 500000.0
    assert config.rope_scaling == RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )


def test_linear_and_yarn_scaling() -> None:
    linear = read(model_type="llama", rope_scaling={"type": "linear", "factor": 4})
    assert linear.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    yarn = read(model_type="qwen2", rope_scaling={"type": "yarn", "factor": 4.0}).rope_scaling
    assert (yarn.kind, yarn.original_max_position, yarn.beta_fast, yarn.beta_slow) == ("yarn", 4096, 32.0, 1.0)
    assert yarn.attention_factor == pytest.approx(1.1386294)  # 0.1 ln 4 + 1
    given = read(model_type="qwen2", rope_scaling={"type": "yarn", "factor": 4.0, "attention_factor": 1.5})
    assert given.rope_scaling.attention_factor == 1.5
    both = read(model_type="llama", rope_scaling={"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5})
    assert both.rope_scaling.attention_factor == pytest.approx(1.1386294 / 1.0693147)


def test_mistral_windows_every_layer_unless_told_not_to() -> None:
    config = read(model_type="mistral", sliding_window=64)
    assert (config.sliding_window, config.window_pattern) == (64, (True,) * 6)
    assert read(model_type="mistral").sliding_window == 4096  # transformers' default
    assert read(model_type="mistral", sliding_window=None).window_pattern == ()


def test_qwen_two_has_biases_and_windows_only_when_switched_on() -> None:
    off = read(model_type="qwen2", sliding_window=64, use_sliding_window=False, max_window_layers=4)
    assert off.qkv_bias
    assert off.window_pattern == ()
    on = read(model_type="qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=4)
    assert on.window_pattern == (False,) * 4 + (True,) * 2


def test_qwen_three_has_its_own_head_size_and_norms() -> None:
    config = read(model_type="qwen3")
    assert (config.head_dim, config.qk_norm, config.qkv_bias) == (128, True, False)


def test_gemma_three_text() -> None:
    config = read(model_type="gemma3_text", head_dim=32, query_pre_attn_scalar=64, sliding_window=512,
                  rope_theta=1000000, rope_local_base_freq=10000)  # fmt: skip
    assert config.window_pattern == (True, True, True, True, True, False)
    assert (config.rope_base, config.rope_base_local) == (1000000.0, 10000.0)
    assert (config.attention_scale, config.activation) == (0.125, "gelu_tanh")
    assert config.embedding_scale == pytest.approx(128**0.5, rel=1e-7)
    assert config.qk_norm
    assert config.sandwich_norms
    assert config.norm_add_one
    assert config.tie_word_embeddings


def test_gemma_three_with_vision_reads_its_text_part_with_the_familys_defaults() -> None:
    """google/gemma-3-4b-it names only what differs from the defaults."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    config = config_from_hf(Path("m"), {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}, {})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert (config.rope_base, config.rope_base_local) == (1000000.0, 10000.0)
    assert [i for i, windowed in enumerate(config.window_pattern) if not windowed] == [5, 11, 17, 23, 29]
    assert config.eos_token_ids == (1, 106)


def test_end_ids_come_from_both_files_once() -> None:
    config = read({"eos_token_id": [7, 5]}, model_type="llama", eos_token_id=5)
    assert config.eos_token_ids == (7, 5)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "architecture": ({"model_type": "mamba"}, "model_type", "supported: llama, mistral, qwen2, qwen3, gemma3"),
    "no architecture": ({"model_type": None}, "model_type", "supported: llama"),
    "gptq": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "gptq weights are not"),
    "awq": ({"quantization_config": {"quant_method": "awq"}}, "quantization_config", "awq weights are not"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias", "not supported"),
    "experts": ({"num_local_experts": 8}, "num_experts", "mixture-of-experts"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "not supported"),
    "activation": ({"hidden_act": "relu"}, "hidden_act", "'relu' is not supported; supported: silu"),
    "scaling": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling", "'dynamic' is not supported"),
    "yarn truncate": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}},
        "rope_scaling.truncate",
        "not supported",
    ),
    "scaling without factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "is missing"),
    "scaling a list": ({"rope_scaling": [1]}, "rope_scaling", "is not an object"),
    "text for a number": ({"hidden_size": "128"}, "hidden_size", "is '128', not a int"),
    "true for a number": ({"num_hidden_layers": True}, "num_hidden_layers", "not a int"),
    "absurd layers": ({"num_hidden_layers": 1 << 40}, "num_hidden_layers", "not in 1..1024"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads", "is 0"),
    "negative vocabulary": ({"vocab_size": -1}, "vocab_size", "not in 1.."),
    "kv heads": ({"num_key_value_heads": 3}, "num_kv_heads", "does not divide 8"),
    "eos": ({"eos_token_id": 1000}, "eos_token_ids", "outside the vocabulary"),
    "eos text": ({"eos_token_id": ["</s>"]}, "eos_token_id", "not a int"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    values, field, words = REFUSED[case]
    with pytest.raises(ModelFileError) as caught:
        read(**{"model_type": "llama"} | values)
    assert caught.value.field == field
    assert words in caught.value.problem
    assert "some-model" in caught.value.path


def test_gemma_refusals() -> None:
    with pytest.raises(ModelFileError, match="embedding models"):
        read(model_type="gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(ModelFileError, match="attn_logit_softcapping"):
        read(model_type="gemma3_text", attn_logit_softcapping=50.0)
    with pytest.raises(ModelFileError, match="text_config"):
        config_from_hf(Path("m"), {"model_type": "gemma3", "text_config": 3}, {})
