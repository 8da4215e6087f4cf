"""WeightPacker: checkpoint tensors in, packed weights out, over all workers of a pool.

Source pages of a file mapping are given back once packed, except those of the embedding table, whose rows are read from
the file at every step. It knows formats and bytes, no operations.
"""

import mmap
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from headrace import _C
from headrace.base.errors import ModelFileError
from headrace.model.checkpoint import Checkpoint, Weight
from headrace.model.graph import WeightRef
from headrace.model.quantize import FORMATS

Progress = Callable[[float], None]  # the fraction done


class WeightPacker:
    def __init__(
        self, checkpoint: Checkpoint, pool: _C.Pool, isa: str, total_bytes: int, progress: Progress | None = None
    ) -> None:
        """`total_bytes`: of all weights as stored, for `progress`."""
        self._checkpoint = checkpoint
        self._pool = pool
        self._isa = isa
        self._total_bytes = max(total_bytes, 1)
        self._done_bytes = 0
        self._progress = progress
        self._tables: set[str] = set()

    def table(self, ref: WeightRef) -> Weight:
        """An embedding table as stored; its rows stay readable after the checkpoint is closed."""
        self._tables.add(ref.name)
        return self._checkpoint.weight(ref)

    def vector(self, refs: Sequence[WeightRef]) -> npt.NDArray[np.float32]:
        """Gains or biases, one after another."""
        parts = [self._checkpoint.weight(ref).data.reshape(-1).view(np.float32) for ref in refs]
        return np.ascontiguousarray(np.concatenate(parts))

    def rows(self, refs: Sequence[WeightRef]) -> _C.Weight:
        """The rows of matrices of one format and width, one after another, as one weight."""
        weights = [self._checkpoint.weight(ref) for ref in refs]
        data = weights[0].data if len(weights) == 1 else np.concatenate([weight.data for weight in weights])
        packed = self._pack(refs[0], weights[0], data, None)
        self._finish(refs, weights)
        return packed

    def interleaved(self, gate: WeightRef, up: WeightRef) -> _C.Weight:
        """Two matrices of one format and shape as one weight for a gated epilogue."""
        weights = [self._checkpoint.weight(gate), self._checkpoint.weight(up)]
        packed = self._pack(gate, weights[0], weights[0].data, weights[1].data)
        self._finish((gate, up), weights)
        return packed

    def _pack(
        self, ref: WeightRef, like: Weight, rows: npt.NDArray[np.uint8], up: npt.NDArray[np.uint8] | None
    ) -> _C.Weight:
        try:
            return _C.pack(self._pool, self._isa, rows, FORMATS[like.format].type_number, like.shape[1], up)
        except ValueError as error:
            problem = f"{like.format} {list(like.shape)}: {error}"
            raise ModelFileError(self._checkpoint.path, ref.name, problem) from error

    def done(self) -> None:
        """Everything that `total_bytes` counted is packed, or stays as it is."""
        self._report(1.0)

    def _report(self, fraction: float) -> None:
        if self._progress is not None:
            self._progress(min(1.0, fraction))

    def _finish(self, refs: Sequence[WeightRef], weights: Sequence[Weight]) -> None:
        for ref, weight in zip(refs, weights, strict=True):
            self._done_bytes += weight.data.nbytes
            if ref.name not in self._tables and _is_mapped(weight.data):
                _C.drop_file_pages(weight.data)
        self._report(self._done_bytes / self._total_bytes)


def _is_mapped(array: npt.NDArray[np.uint8]) -> bool:
    """Whether the array views a file mapping: only then may its pages be dropped without loss."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return isinstance(base, mmap.mmap)
