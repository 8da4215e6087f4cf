"""WeightPacker: checkpoint tensors in, packed weights out, over all workers of a pool or from the cache on disk.

What packing read of the model file is given back at once; of the embedding table, whose rows are read from the file at
every step, the pages that are asked for come again. It knows formats and bytes, no operations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace import _C
from headrace.backend.pack_cache import PackCache
from headrace.base.errors import ModelFileError
from headrace.model.checkpoint import Checkpoint, Weight
from headrace.model.formats import FORMATS
from headrace.model.graph import Graph, WeightRef
from headrace.model.planner import op_weights

Progress = Callable[[float], None]  # the fraction done


@dataclass(frozen=True, slots=True)
class _Job:
    """A weight that has its place and must be filled."""

    weight: _C.Weight
    refs: tuple[WeightRef, ...]
    interleave: bool

    @property
    def name(self) -> str:
        parts = " + ".join(f"{ref.name} {ref.transform} {ref.quant}" for ref in self.refs)
        return f"{parts} interleaved" if self.interleave else parts


class WeightPacker:
    """`rows` and `interleaved` give weights that are filled by `pack`, all at once."""

    def __init__(
        self,
        graph: Graph,
        checkpoint: Checkpoint,
        pool: _C.Pool,
        isa: str,
        progress: Progress | None = None,
        cache: PackCache | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._pool = pool
        self._isa = isa
        self._progress = progress
        self._cache = cache
        self._shapes = {ref.name: shape for op in graph.ops for ref, *shape in op_weights(graph, op)}
        self._arena = _C.Arena()
        self._jobs: list[_Job] = []

    def table(self, ref: WeightRef) -> Weight:
        """An embedding table as stored; its rows stay readable after the checkpoint is closed."""
        return self._checkpoint.weight(ref)

    def vector(self, refs: Sequence[WeightRef]) -> npt.NDArray[np.float32]:
        """Gains or biases, one after another."""
        parts = [self._checkpoint.weight(ref).data.reshape(-1).view(np.float32) for ref in refs]
        return np.ascontiguousarray(np.concatenate(parts))

    def rows(self, refs: Sequence[WeightRef]) -> _C.Weight:
        """The rows of matrices of one format and width, one after another, as one weight."""
        return self._place(tuple(refs), sum(self._shapes[ref.name][0] for ref in refs), False)

    def interleaved(self, gate: WeightRef, up: WeightRef) -> _C.Weight:
        """Two matrices of one format and shape as one weight for a gated epilogue."""
        return self._place((gate, up), self._shapes[gate.name][0], True)

    def pack(self) -> None:
        """Fills every weight that was given out. Raises ModelFileError for a matrix that is not as the graph says."""
        sections = {job.name: np.asarray(job.weight.data, np.uint8) for job in self._jobs}
        missing = set(sections) if self._cache is None else self._cache.restore(self._pool, self._isa, sections)
        jobs = [job for job in self._jobs if job.name in missing]
        total = max(1, sum(job.weight.nbytes for job in jobs))
        done = 0
        for job in jobs:
            self._report(done / total)
            self._pack(job)
            done += job.weight.nbytes
        self._report(1.0)
        if self._cache is not None:
            self._cache.store(self._isa, sections)

    def _place(self, refs: tuple[WeightRef, ...], num_rows: int, interleave: bool) -> _C.Weight:
        ref, num_inputs = refs[0], self._shapes[refs[0].name][1]
        number = FORMATS[ref.quant].type_number
        try:
            weight = _C.new_weight(self._isa, self._arena, number, num_rows, num_inputs, interleave)
        except ValueError as error:
            problem = f"{ref.quant} {[num_rows, num_inputs]}: {error}"
            raise ModelFileError(self._checkpoint.path, ref.name, problem) from error
        self._jobs.append(_Job(weight, refs, interleave))
        return weight

    def _pack(self, job: _Job) -> None:
        weights = [self._checkpoint.weight(ref) for ref in job.refs]
        joined, up = ([weights[0]], weights[1].data) if job.interleave else (weights, None)
        rows = joined[0].data if len(joined) == 1 else np.concatenate([weight.data for weight in joined])
        try:
            _C.pack(self._pool, job.weight, rows, FORMATS[weights[0].format].type_number, up)
        except ValueError as error:
            raise ModelFileError(self._checkpoint.path, job.refs[0].name, str(error)) from error
        self._checkpoint.release_pages()

    def _report(self, fraction: float) -> None:
        if self._progress is not None:
            self._progress(fraction)
