"""ModelConfig from a Hugging Face config.json (and generation_config.json).

Keys that a config.json leaves out take the defaults that transformers' configuration classes have; the older spelling
(rope_theta, rope_scaling) and the newer one (rope_parameters) are both read. What would change the model's output and
is not supported is refused, never skipped.
"""

import math
from pathlib import Path
from typing import Any, Literal, TypeVar

from headrace.base.errors import ModelFileError
from headrace.model.config import FAMILIES, ModelConfig, RopeScaling, as_float32, check_config, yarn_attention_factor

T = TypeVar("T", int, float, str, bool)

# model_type -> family
_MODEL_TYPES = {**{family: family for family in FAMILIES}, "gemma3_text": "gemma3"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mistral": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8,
    },
    "qwen2": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    "gemma3": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6, "sliding_window": 4096, "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}  # fmt: skip
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_GEMMA_PATTERN = 6
_MAX_LAYERS = 1024  # checked before a per-layer tuple is made


class _Fields:
    """Typed reads of config.json with the family's defaults; null counts as absent, as transformers treats it."""

    def __init__(self, path: Path, values: dict[str, Any], family: str) -> None:
        self.path = path / "config.json"
        self.values = values
        self.defaults = _DEFAULTS[family]

    def fail(self, key: str, problem: str) -> ModelFileError:
        return ModelFileError(self.path, key, problem)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self.find(key, kind)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "is missing")
        return value

    def find(self, key: str, kind: type[T]) -> T | None:
        value = self.values.get(key)
        # An explicit null stays null for a window ("no window"), where the default would switch it on.
        if value is None and not (key in self.values and key == "sliding_window"):
            value = self.defaults.get(key)
        return None if value is None else self.typed(key, value, kind)

    def typed(self, key: str, value: Any, kind: type[T]) -> T:
        if kind is float and type(value) is int and abs(value) < 1 << 62:
            return kind(value)
        if type(value) is not kind:
            raise self.fail(key, f"is {value!r:.60}, not a {kind.__name__}")
        return value


def config_from_hf(path: Path, config: dict[str, Any], generation_config: dict[str, Any]) -> ModelConfig:
    """`path` is the folder. Raises ModelFileError for what is unsupported, missing, of a wrong type or does not fit."""
    model_type = config.get("model_type")
    family = _MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        supported = ", ".join(_MODEL_TYPES)
        problem = f"{model_type!r} is not supported; supported: {supported}"
        raise ModelFileError(path / "config.json", "model_type", problem)
    text = config.get("text_config", {}) if model_type == "gemma3" else {}
    if not isinstance(text, dict):
        raise ModelFileError(path / "config.json", "text_config", "is not an object")
    fields = _Fields(path, config | text, family)
    _refuse(fields, family)
    hidden, heads = fields.get("hidden_size", int), fields.get("num_attention_heads", int)
    if heads <= 0:
        raise fields.fail("num_attention_heads", f"is {heads}")
    layers = fields.get("num_hidden_layers", int)
    if not 0 < layers <= _MAX_LAYERS:
        raise fields.fail("num_hidden_layers", f"is {layers}, not in 1..{_MAX_LAYERS}")
    head_dim = fields.get("head_dim", int, hidden // heads)
    max_position = fields.get("max_position_embeddings", int)
    act_key = "hidden_activation" if family == "gemma3" else "hidden_act"
    activation = fields.get(act_key, str, "silu")
    if activation not in _ACTIVATIONS:
        raise fields.fail(act_key, f"{activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    rope_base, scaling = _rope(fields, family, max_position)
    result = ModelConfig(
        family=family,
        name=path.resolve().name,
        vocab_size=fields.get("vocab_size", int),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", int, heads),
        head_dim=head_dim,
        intermediate_size=fields.get("intermediate_size", int),
        max_position=max_position,
        rms_norm_eps=fields.get("rms_norm_eps", float),
        rope_base=rope_base,
        rope_scaling=scaling,
        activation=_ACTIVATIONS[activation],
        qk_norm=family in ("qwen3", "gemma3"),
        qkv_bias=family == "qwen2" or fields.get("attention_bias", bool, False),
        tie_word_embeddings=fields.get("tie_word_embeddings", bool, False),
        eos_token_ids=_end_ids(fields, generation_config),
        bos_token_id=_optional_id(fields, "bos_token_id"),
        **_windows(fields, family, layers),
        **(_gemma3(fields, hidden) if family == "gemma3" else {}),
    )
    return check_config(path / "config.json", result)


def _refuse(fields: _Fields, family: str) -> None:
    values = fields.values
    quantisation = values.get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else "unknown"
        problem = f"{method} weights are not supported; use the unquantised model or a GGUF file"
        raise fields.fail("quantization_config", problem)
    if fields.get("mlp_bias", bool, False):
        raise fields.fail("mlp_bias", "biases in the MLP are not supported")
    if values.get("num_local_experts") or values.get("num_experts"):
        raise fields.fail("num_experts", "mixture-of-experts models are not supported yet")
    if fields.get("partial_rotary_factor", float, 1.0) != 1.0:
        raise fields.fail("partial_rotary_factor", "partly rotated heads are not supported")
    if family == "gemma3":
        if fields.get("use_bidirectional_attention", bool, False):
            raise fields.fail("use_bidirectional_attention", "embedding models are not supported")
        if fields.find("attn_logit_softcapping", float):
            raise fields.fail("attn_logit_softcapping", "is not defined for gemma3")


def _windows(fields: _Fields, family: str, layers: int) -> dict[str, Any]:
    """sliding_window and window_pattern, as transformers' configuration classes derive them."""
    window = fields.find("sliding_window", int)
    if family == "llama" or window is None:
        return {}
    if family in ("qwen2", "qwen3") and not fields.get("use_sliding_window", bool, False):
        return {}
    kinds = fields.values.get("layer_types")
    if family == "mistral":
        pattern = (True,) * layers
    elif kinds is not None:
        if not isinstance(kinds, list) or any(k not in ("sliding_attention", "full_attention") for k in kinds):
            raise fields.fail("layer_types", "is not a list of sliding_attention and full_attention")
        pattern = tuple(k == "sliding_attention" for k in kinds)
    elif family == "gemma3":
        period = fields.get("sliding_window_pattern", int, _GEMMA_PATTERN)
        if period <= 0:
            raise fields.fail("sliding_window_pattern", f"is {period}")
        pattern = tuple((i + 1) % period != 0 for i in range(layers))
    else:
        first = fields.get("max_window_layers", int, 28)
        pattern = tuple(i >= first for i in range(layers))
    return {"sliding_window": window, "window_pattern": pattern}


def _gemma3(fields: _Fields, hidden: int) -> dict[str, Any]:
    query_scale = fields.get("query_pre_attn_scalar", float)
    if not 0 < query_scale < 1e6:
        raise fields.fail("query_pre_attn_scalar", f"is {query_scale}")
    return {
        "sandwich_norms": True,
        "norm_add_one": True,
        # transformers rounds this factor to the weights' dtype: it is 25.25 for bf16 weights of the 270M model and
        # 25.298221 for float32 ones. Activations are float32 here, so the latter is the one to match.
        "embedding_scale": as_float32(math.sqrt(max(hidden, 0))),
        "attention_scale": query_scale**-0.5,
        "final_logit_softcap": fields.get("final_logit_softcapping", float, 0.0),
        "rope_base_local": _local_base(fields),
    }


def _parameters(fields: _Fields, key: str) -> dict[str, Any]:
    value = fields.values.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fields.fail(key, "is not an object")
    return value


def _local_base(fields: _Fields) -> float:
    nested = _parameters(fields, "rope_parameters").get("sliding_attention") or {}
    if not isinstance(nested, dict) or nested.get("rope_type", "default") != "default":
        raise fields.fail("rope_parameters.sliding_attention", "is not an object of rope_type default")
    fallback = fields.get("rope_local_base_freq", float, 10000.0)
    return fields.typed("rope_theta", nested.get("rope_theta", fallback), float)


def _rope(fields: _Fields, family: str, max_position: int) -> tuple[float, RopeScaling]:
    """Base and scaling of the layers that see everything."""
    parameters = _parameters(fields, "rope_parameters")
    if family == "gemma3" and parameters:
        parameters = parameters.get("full_attention") or {}
        if not isinstance(parameters, dict):
            raise fields.fail("rope_parameters.full_attention", "is not an object")
    parameters = parameters | _parameters(fields, "rope_scaling")
    default_base = 1_000_000.0 if family == "gemma3" else 10000.0
    base = fields.typed(
        "rope_theta", parameters.get("rope_theta", fields.get("rope_theta", float, default_base)), float
    )
    return base, _scaling(fields, parameters, max_position)


def _scaling(fields: _Fields, parameters: dict[str, Any], max_position: int) -> RopeScaling:
    def number(key: str, default: float | None = None) -> float:
        value = parameters.get(key)
        if value is None:
            value = default
        if value is None:
            raise fields.fail(f"rope_scaling.{key}", "is missing")
        return fields.typed(f"rope_scaling.{key}", value, float)

    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=number("factor"))
    if kind not in ("llama3", "yarn"):
        raise fields.fail("rope_scaling", f"{kind!r} is not supported; supported: default, linear, llama3, yarn")
    original = number("original_max_position_embeddings", float(max_position))
    if not 0 < original < 1 << 31:
        raise fields.fail("rope_scaling.original_max_position_embeddings", f"is {original}")
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_max_position=int(original),
        )
    if parameters.get("truncate", True) is not True:
        raise fields.fail("rope_scaling.truncate", "false is not supported")
    factor = number("factor", max_position / original)
    attention = yarn_attention_factor(factor)
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        attention = yarn_attention_factor(factor, number("mscale")) / yarn_attention_factor(
            factor, number("mscale_all_dim")
        )
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=int(original),
        attention_factor=number("attention_factor", attention),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
    )


def _end_ids(fields: _Fields, generation_config: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end a generation: config.json names some, generation_config.json often more."""
    ids: list[int] = []
    for source in (generation_config, fields.values):
        value = source.get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        ids.extend(fields.typed("eos_token_id", v, int) for v in listed)
    return tuple(dict.fromkeys(ids))


def _optional_id(fields: _Fields, key: str) -> int | None:
    value = fields.find(key, int)
    return value if value is None or value >= 0 else None
