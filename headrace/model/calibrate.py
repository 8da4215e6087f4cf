"""Which inputs of each matrix matter: how large they are on real text.

A matrix's error reaches the model multiplied by the matrix's inputs, and these differ in size by orders of magnitude
from one to the next. Their mean squares are the weights by which model/encode.py fits its scales.
"""

import numpy as np
import numpy.typing as npt

from headrace.model.checkpoint import Checkpoint
from headrace.model.graph import Graph, Op
from headrace.model.numpy_executor import Array, NumpyExecutor

F32 = npt.NDArray[np.float32]

_FLOOR = 1e-4  # of the mean: an input that this text never used may be needed by another


class CalibratingExecutor(NumpyExecutor):
    """A NumpyExecutor that, while `listening`, sums the squares of what its matrices are given."""

    def __init__(self, graph: Graph, checkpoint: Checkpoint) -> None:
        super().__init__(graph, checkpoint, np.float32)
        self.listening = False
        self._squares: dict[str, npt.NDArray[np.float64]] = {}

    def importance(self) -> dict[str, F32]:
        """Weight name -> float32 [inputs] with mean 1, for every matrix that was used while listening."""
        return {
            name: np.maximum(total / max(total.mean(), 1e-30), _FLOOR).astype(np.float32)
            for name, total in self._squares.items()
        }

    def _listen(self, op: Op, x: Array) -> None:
        if self.listening:
            squares = np.square(x, dtype=np.float64).sum(axis=0)
            for ref in op.weights:
                self._squares[ref.name] = self._squares.get(ref.name, 0) + squares

    def _linear(self, op: Op, inputs: list[Array], weights: list[Array]) -> Array:
        self._listen(op, inputs[0])
        return super()._linear(op, inputs, weights)

    def _gated_mlp(self, op: Op, inputs: list[Array], weights: list[Array]) -> Array:
        self._listen(op, inputs[0])
        return super()._gated_mlp(op, inputs, weights)
