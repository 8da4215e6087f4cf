"""Which operations of a Graph run as one: decisions only, shared by the lowering and by `headrace inspect`.

q, k, v of one input      one GEMM over their concatenated rows, where their formats agree
gate, up                  one GEMM over interleaved rows, where their formats agree
linear, add               the add is the GEMM's epilogue, in place in the residual
linear, norm, add         the norm adds into the residual
head norm, rope           one pass in place
"""

from collections import defaultdict

from headrace.base.errors import HeadraceError
from headrace.model.graph import Graph, Op, WeightRef

FLOAT_FORMATS = ("F32", "F16", "BF16")


class LoweringError(HeadraceError):
    """The graph holds an operation, or operations in an order, that the CPU backend cannot run."""


class Fusion:
    """Answers about one graph. Indices are into graph.ops."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._readers: defaultdict[str, list[int]] = defaultdict(list)
        for index, op in enumerate(graph.ops):
            for tensor in op.inputs:
                self._readers[tensor].append(index)
        self.absorbed: set[int] = set()  # linears that are columns of the GEMM of one before them
        for index, op in enumerate(graph.ops):
            if op.kind == "linear" and index not in self.absorbed:
                self.absorbed.update(self.siblings(index)[1:])

    def last_reader(self, tensor: str) -> int:
        """Index of the last operation that reads `tensor`; -1 if none does."""
        return max(self._readers[tensor], default=-1)

    def width(self, tensor: str) -> int:
        return self._graph.axes[self._graph.tensors[tensor][-1]]

    def is_output_rows(self, tensor: str) -> bool:
        """Whether the tensor has a row per output row, not per token."""
        return self._graph.tensors[tensor][0] == "rows"

    def siblings(self, index: int) -> tuple[int, ...]:
        """The run of linears from `index` on that share input and format: one GEMM. At least `index` itself."""
        first = self._graph.ops[index]
        group = [index]
        for after in range(index + 1, len(self._graph.ops)):
            op = self._graph.ops[after]
            same = op.kind == "linear" and op.inputs == first.inputs
            if not same or op.weights[0].quant != first.weights[0].quant:
                break
            group.append(after)
        return tuple(group)

    def joins_previous(self, index: int) -> bool:
        """Whether this linear reads what the one before it read, so that no barrier need stand between them."""
        op, before = self._graph.ops[index], self._graph.ops[index - 1]
        return before.kind == "linear" and before.inputs == op.inputs

    def interleaves(self, op: Op) -> bool:
        gate, up = op.weights
        return gate.quant == up.quant

    def add_after(self, tensor: str) -> tuple[str, str] | None:
        """(residual, sum) of the add that is the only reader of `tensor`, or None. The residual must end there.

        Raises LoweringError when the residual is read later, so that it cannot be added to in place.
        """
        readers = self._readers[tensor]
        if len(readers) != 1 or self._graph.ops[readers[0]].kind != "add":
            return None
        add = self._graph.ops[readers[0]]
        residual = add.inputs[1] if add.inputs[0] == tensor else add.inputs[0]
        if self.last_reader(residual) != readers[0]:
            raise LoweringError(f"{residual} is read again after {add.output} was added to it")
        return residual, add.output

    def reads(self, tensor: str) -> tuple[bool, bool]:
        """(f32, int8): the forms in which the weights that multiply `tensor` read it."""
        formats = [ref.quant for index in self._readers[tensor] for ref in multiplied(self._graph.ops[index])]
        return any(f in FLOAT_FORMATS for f in formats), any(f not in FLOAT_FORMATS for f in formats)


def multiplied(op: Op) -> tuple[WeightRef, ...]:
    """The matrices of an operation that multiply its input."""
    return op.weights if op.kind in ("linear", "gated_mlp") else ()
