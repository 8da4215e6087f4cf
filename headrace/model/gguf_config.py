"""ModelConfig from GGUF metadata, and GGUF metadata from a ModelConfig.

Some facts are not in the file and come from the family's definition: Gemma 3's window pattern (five windowed layers,
then one that sees everything), its local rope base and, for the 27B model, its query scale. Llama-3-style rope scaling
is stored as the tensor rope_freqs.weight. Mistral models carry the architecture name "llama".
"""

import math
from array import array
from typing import Any, TypeVar

from headrace.base.errors import ModelFileError
from headrace.model.config import ModelConfig, RopeScaling, as_float32, check_config, yarn_attention_factor
from headrace.model.gguf import GGUFFile, StringArray

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
T = TypeVar("T", int, float, str, bool)

_GEMMA_PATTERN = 6
_GEMMA_LOCAL_BASE = 10000.0
_GEMMA_27B_LAYERS = 62

# Sampling defaults: key of a GGUF file -> generation_config.json's name.
SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


class _Fields:
    """Typed reads of `<architecture>.<key>`; a wrong type or a missing key is a ModelFileError."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file = file
        self.arch = arch

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.file.metadata

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        return _get(self.file, f"{self.arch}.{key}", kind, default)

    def uniform(self, key: str, default: int | None = None) -> int:
        """A count that may be stored once for each layer; only equal ones are supported."""
        full = f"{self.arch}.{key}"
        value = self.file.metadata.get(full)
        if not isinstance(value, array):
            return self.get(key, int, default)
        if value.typecode in "fd" or len(set(value)) != 1:
            raise ModelFileError(self.file.path, full, "differs from layer to layer, which is not supported")
        return int(value[0])


def _get(file: GGUFFile, key: str, kind: type[T], default: T | None) -> T:
    value = file.metadata.get(key, default)
    if value is None:
        raise ModelFileError(file.path, key, "is missing")
    if kind is float and type(value) is int:
        return kind(value)
    if type(value) is not kind:
        raise ModelFileError(file.path, key, f"is a {type(value).__name__}, not a {kind.__name__}")
    return value


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Raises ModelFileError for an unsupported architecture, a missing key, a wrong type or numbers that do not fit."""
    arch = _get(file, "general.architecture", str, None)
    if arch not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ModelFileError(file.path, "general.architecture", f"{arch!r} is not supported; supported: {supported}")
    if (parts := _get(file, "split.count", int, 1)) > 1:
        problem = f"the model is split into {parts} files; join them with `llama-gguf-split --merge`"
        raise ModelFileError(file.path, "split.count", problem)
    fields = _Fields(file, arch)
    if fields.get("expert_count", int, 0):
        raise ModelFileError(file.path, f"{arch}.expert_count", "mixture-of-experts models are not supported yet")
    hidden, heads = fields.get("embedding_length", int), fields.uniform("attention.head_count")
    if heads <= 0:
        raise ModelFileError(file.path, f"{arch}.attention.head_count", f"is {heads}")
    head_dim = fields.get("attention.key_length", int, hidden // heads)
    _check_head(fields, head_dim)
    vocab = _vocab_size(file)
    config = ModelConfig(
        family=arch,
        name=_get(file, "general.name", str, file.path.stem),
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=fields.get("block_count", int),
        num_heads=heads,
        num_kv_heads=fields.uniform("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=fields.uniform("feed_forward_length"),
        max_position=fields.get("context_length", int),
        rms_norm_eps=fields.get("attention.layer_norm_rms_epsilon", float),
        rope_base=fields.get("rope.freq_base", float, 10000.0),
        rope_scaling=_scaling(fields),
        qk_norm=arch in ("qwen3", "gemma3"),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        tie_word_embeddings="output.weight" not in file.tensors,
        rope_factors=_rope_factors(file),
        eos_token_ids=_end_ids(file, vocab),
        bos_token_id=_token_id(file, "bos", vocab),
        **(_gemma3(fields, hidden, heads, head_dim) if arch == "gemma3" else _window(fields)),
    )
    return check_config(file.path, config)


def _check_head(fields: _Fields, head_dim: int) -> None:
    if fields.get("attention.value_length", int, head_dim) != head_dim:
        problem = f"differs from the key length {head_dim}, which is not supported"
        raise ModelFileError(fields.file.path, f"{fields.arch}.attention.value_length", problem)
    if fields.get("rope.dimension_count", int, head_dim) != head_dim:
        problem = f"rotates a part of the {head_dim} head dimensions, which is not supported"
        raise ModelFileError(fields.file.path, f"{fields.arch}.rope.dimension_count", problem)


def _vocab_size(file: GGUFFile) -> int:
    """The rows of the embedding: it may be padded beyond the token list, never shorter."""
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise ModelFileError(file.path, "token_embd.weight", "is missing or not a matrix")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return info.shape[0]
    if not isinstance(tokens, StringArray):
        raise ModelFileError(file.path, "tokenizer.ggml.tokens", "is not an array of strings")
    if len(tokens) > info.shape[0]:
        problem = f"has {len(tokens)} tokens, the embedding only {info.shape[0]} rows"
        raise ModelFileError(file.path, "tokenizer.ggml.tokens", problem)
    return info.shape[0]


def _window(fields: _Fields) -> dict[str, Any]:
    """Every layer windowed where the file sets a window (Mistral), none elsewhere."""
    window = fields.get("attention.sliding_window", int, 0)
    layers = fields.get("block_count", int)
    if not window or layers > 1024:
        return {}
    return {"sliding_window": window, "window_pattern": (True,) * layers}


def _gemma3(fields: _Fields, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    layers = fields.get("block_count", int)
    scale = (hidden / heads) ** -0.5 if layers == _GEMMA_27B_LAYERS else head_dim**-0.5 if head_dim > 0 else 0.0
    values: dict[str, Any] = {
        "activation": "gelu_tanh",
        "sandwich_norms": True,
        "embedding_scale": as_float32(math.sqrt(max(hidden, 0))),
        "attention_scale": scale,
        "final_logit_softcap": fields.get("final_logit_softcapping", float, 0.0),
    }
    window = fields.get("attention.sliding_window", int, 0)
    if window and layers <= 1024:
        period = fields.get("attention.sliding_window_pattern", int, _GEMMA_PATTERN)
        if period <= 0:
            raise ModelFileError(fields.file.path, "gemma3.attention.sliding_window_pattern", f"is {period}")
        values["sliding_window"] = window
        values["window_pattern"] = tuple((i + 1) % period != 0 for i in range(layers))
        values["rope_base_local"] = fields.get("rope.freq_base_swa", float, _GEMMA_LOCAL_BASE)
    return values


def _scaling(fields: _Fields) -> RopeScaling:
    kind = fields.get("rope.scaling.type", str, "linear" if fields.has("rope.scaling.factor") else "none")
    factor = fields.get("rope.scaling.factor", float, 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind != "yarn":
        problem = f"{kind!r} is not supported; supported: none, linear, yarn and stored rope_freqs"
        raise ModelFileError(fields.file.path, f"{fields.arch}.rope.scaling.type", problem)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=fields.get(
            "rope.scaling.original_context_length", int, fields.get("context_length", int)
        ),
        attention_factor=fields.get("rope.scaling.attn_factor", float, 1.0) * yarn_attention_factor(factor),
        beta_fast=fields.get("rope.scaling.yarn_beta_fast", float, 32.0),
        beta_slow=fields.get("rope.scaling.yarn_beta_slow", float, 1.0),
    )


def _rope_factors(file: GGUFFile) -> tuple[float, ...]:
    info = file.tensors.get("rope_freqs.weight")
    if info is None:
        return ()
    if len(info.shape) != 1:
        raise ModelFileError(file.path, info.name, f"has shape {list(info.shape)}, not one dimension")
    from headrace.model.quantize import dequantize

    return tuple(float(v) for v in dequantize(file.read(info.name), info.format)[0])


def _token_id(file: GGUFFile, role: str, vocab: int) -> int | None:
    """The id stored for a role, or None. Some files hold 0xFFFFFFFF or -1 for "none"."""
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in file.metadata:
        return None
    value = _get(file, key, int, None)
    if value in (-1, 0xFFFFFFFF):
        return None
    if not 0 <= value < vocab:
        raise ModelFileError(file.path, key, f"is {value}, outside the vocabulary of {vocab}")
    return value


def _end_ids(file: GGUFFile, vocab: int) -> tuple[int, ...]:
    """The ids that the metadata names as ending a turn. Control tokens known by their text are text's to find."""
    ids = (_token_id(file, role, vocab) for role in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def metadata_of_config(config: ModelConfig) -> dict[str, Any]:
    """What config_from_gguf reads, written: the architecture's keys, without the tokenizer's.

    A reader derives some facts from the family alone, so a model that departs from its family reads back as another
    one: the caller compares the graphs. Llama 3's scaling is a tensor (model.rope.rope_divisors), not metadata.
    """
    arch = "llama" if config.family == "mistral" else config.family
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "vocab_size": config.vocab_size,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_base,
    }
    if any(config.window_pattern):
        values["attention.sliding_window"] = config.sliding_window
        if arch == "gemma3":
            values["rope.freq_base_swa"] = config.rope_base_local
            period = (*config.window_pattern, False).index(False) + 1
            if period != _GEMMA_PATTERN:
                values["attention.sliding_window_pattern"] = period
    if config.final_logit_softcap:
        values["final_logit_softcapping"] = config.final_logit_softcap
    scaling = config.rope_scaling
    if scaling.kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
    if scaling.kind == "yarn":
        values |= {
            "rope.scaling.original_context_length": scaling.original_max_position,
            "rope.scaling.attn_factor": scaling.attention_factor / yarn_attention_factor(scaling.factor),
            "rope.scaling.yarn_beta_fast": scaling.beta_fast,
            "rope.scaling.yarn_beta_slow": scaling.beta_slow,
        }
    return {"general.architecture": arch, "general.name": config.name} | {f"{arch}.{k}": v for k, v in values.items()}
