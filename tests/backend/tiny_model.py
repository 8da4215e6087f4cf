"""A tiny random model in memory, in any mixture of weight formats: a Checkpoint that makes tensors as a graph asks."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.model.checkpoint import Weight
from headrace.model.config import ModelConfig
from headrace.model.formats import FORMATS
from headrace.model.graph import WeightRef

HIDDEN = 256  # K-quants need multiples of 256
CONFIG = ModelConfig(
    family="llama",
    name="tiny",
    vocab_size=333,  # no multiple of a panel
    hidden_size=HIDDEN,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=256,
    max_position=4096,
    rms_norm_eps=1e-5,
    rope_base=10000.0,
)
# Sandwich norms, windowed and full layers, head norms, both rope bases, softcaps: what Llama has not.
GEMMA = replace(
    CONFIG,
    family="gemma3",
    num_layers=3,
    rope_base_local=1000.0,
    sliding_window=24,
    window_pattern=(True, False, True),
    final_logit_softcap=8.0,
    attn_logit_softcap=20.0,
    activation="gelu_tanh",
    qk_norm=True,
    sandwich_norms=True,
    embedding_scale=16.0,
    tie_word_embeddings=True,
)

FormatRule = Callable[[str], str]  # tensor name -> storage format


class TinyCheckpoint:
    """Implements Checkpoint. Tensors depend on their names and `seed` only."""

    def __init__(self, config: ModelConfig, rule: str | FormatRule, seed: int = 0, *, q_bias: bool = False) -> None:
        self.path = Path("tiny")
        self.config = config
        self.format = "gguf"
        self.metadata: dict[str, Any] = {}
        self._rule: FormatRule = rule if callable(rule) else lambda _name: rule
        self._seed = seed
        self._q_bias = q_bias
        self._weights: dict[str, Weight] = {}

    def names(self) -> list[str]:
        return list(self._weights)

    def has(self, name: str) -> bool:
        return self._q_bias and name.endswith(".bias")

    def ref(self, name: str, shape: tuple[int, ...]) -> WeightRef:
        if name not in self._weights:
            rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
            self._weights[name] = _vector(rng, name, shape) if len(shape) == 1 else self._matrix(rng, name, shape)
        return WeightRef(name, "", self._weights[name].format)

    def _matrix(self, rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Weight:
        fmt = self._rule(name)
        return Weight(fmt, shape, random_rows(rng, fmt, *shape))

    def weight(self, ref: WeightRef) -> Weight:
        return self._weights[ref.name]

    def release_pages(self) -> None:
        pass

    def close(self) -> None:
        pass


def _vector(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Weight:
    values = rng.normal(0.0 if name.endswith("bias") else 1.0, 0.2, shape).astype(np.float32)
    return Weight("F32", shape, values.view(np.uint8).reshape(1, -1))


def random_rows(rng: np.random.Generator, fmt: str, n: int, k: int) -> npt.NDArray[np.uint8]:
    """Rows whose values have a standard deviation near 1 / sqrt(k), with every bit of every quant in use."""
    spread = k**-0.5
    values = rng.normal(0, spread, (n, k)).astype(np.float32)
    if fmt == "F32":
        return values.view(np.uint8)
    if fmt == "F16":
        return values.astype(np.float16).view(np.uint8)
    if fmt == "BF16":
        return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    spec = FORMATS[fmt]
    blocks = rng.integers(0, 256, (n, k // spec.block_size, spec.block_bytes), dtype=np.uint8)
    levels = {"4": 16, "5": 32, "6": 64, "8": 256}[fmt[1]]
    step = spread * 3.5 / levels * rng.uniform(0.5, 1.5, blocks.shape[:2])  # uniform over `levels` values
    if fmt.endswith("_K"):
        step /= 74 if fmt == "Q6_K" else 32  # the usual size of the sub-block scales
    _put_half(blocks, 208 if fmt == "Q6_K" else 0, step)
    if fmt in ("Q4_1", "Q5_1"):
        _put_half(blocks, 2, -step * (levels - 1) / 2)
    if fmt in ("Q4_K", "Q5_K"):
        _put_half(blocks, 2, step * (levels - 1) / 2)
    return blocks.reshape(n, -1)


def _put_half(blocks: npt.NDArray[np.uint8], at: int, values: npt.NDArray[np.float64]) -> None:
    blocks[:, :, at : at + 2] = values.astype(np.float16)[..., None].view(np.uint8)
