"""The seam between decisions and tensors. Everything on the far side of `Backend` may hold memory and threads."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.core.batch import Batch, StepResult
from headrace.core.kv_group import KVDtype, KVGroup


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What a scheduler must know of a backend."""

    kv_groups: tuple[KVGroup, ...]
    num_blocks: tuple[int, ...]  # one count per KV group
    block_size: int
    vocab_size: int
    max_tokens: int  # tokens in one Batch
    max_rows: int  # output rows in one Batch
    max_seqs: int
    max_model_len: int
    kv_dtype: KVDtype = "bf16"


class Backend(Protocol):
    """Executes Batches in submission order.

    Frees and aborts take effect only after the last submitted step that uses the block.
    """

    @property
    def spec(self) -> BackendSpec: ...

    def submit(self, batch: Batch) -> None:
        """Start a step. At most one step more than collected may be in flight."""
        ...

    def set_masks(self, step_id: int, bits: npt.NDArray[np.int32]) -> None:
        """Give the grammar masks of a submitted step, any time before that step samples."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step."""
        ...

    def read_blocks(self, group: int, ids: npt.NDArray[np.int32]) -> bytes: ...

    def write_blocks(self, group: int, ids: npt.NDArray[np.int32], data: bytes) -> None: ...

    def close(self) -> None: ...
