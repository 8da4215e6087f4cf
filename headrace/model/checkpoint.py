"""What every checkpoint format gives: a config, weights by canonical name, and the sources of text handling."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.model.config import ModelConfig
from headrace.model.graph import WeightRef


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor as stored, its transform already applied.

    `data` is uint8 [rows, row_bytes] (rows = 1 for 1-D), possibly a read-only memory map; `shape` is (out, in) or (n,).
    """

    format: str  # "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


class Checkpoint(Protocol):
    path: Path
    config: ModelConfig
    format: str  # "gguf" | "safetensors"
    metadata: dict[str, Any]

    def names(self) -> list[str]: ...
    def has(self, name: str) -> bool: ...
    def weight(self, ref: WeightRef) -> Weight: ...
    def close(self) -> None: ...
