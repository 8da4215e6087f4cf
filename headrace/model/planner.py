"""What a graph costs: parameters, bytes, operations, KV cache. Counted from the Graph, never from the model's name.

It knows no machine: callers give it bytes and get back tokens or blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.core.kv_group import KVDtype, KVGroup
from headrace.model.formats import FORMATS
from headrace.model.graph import Graph, Op, WeightRef


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Operations are multiply-adds counted as two; those of attention grow with context and stand apart."""

    parameters: int  # a tied head counts once
    weight_bytes: int  # as stored
    bytes_by_format: dict[str, int]
    operations_per_token: int  # every matrix except the head
    operations_per_row: int  # the head: only for positions whose logits are asked for
    attention_operations: tuple[int, ...]  # per token and attended position, per KV group
    kv_bytes_per_token: tuple[int, ...]  # per KV group


def measure_graph(graph: Graph, kv_dtype: KVDtype = "bf16") -> ModelSize:
    """Counts one graph. Weights that two operations share are counted once, their operations twice."""
    shapes: dict[str, tuple[WeightRef, int, int]] = {}
    per_token = per_row = 0
    attention = [0] * len(graph.kv_groups)
    for op in graph.ops:
        for ref, rows, columns in op_weights(graph, op):
            shapes[ref.name] = (ref, rows, columns)
            if op.kind in ("linear", "gated_mlp") and rows > 1:
                if graph.tensors[op.output][0] == "rows":
                    per_row += 2 * rows * columns
                else:
                    per_token += 2 * rows * columns
        if op.kind == "attention":
            attention[op.attrs["kv_group"]] += 4 * op.attrs["num_heads"] * op.attrs["head_dim"]
    by_format: dict[str, int] = {}
    for ref, rows, columns in shapes.values():
        by_format[ref.quant] = by_format.get(ref.quant, 0) + rows * FORMATS[ref.quant].row_bytes(columns)
    return ModelSize(
        parameters=sum(rows * columns for _, rows, columns in shapes.values()),
        weight_bytes=sum(by_format.values()),
        bytes_by_format=by_format,
        operations_per_token=per_token,
        operations_per_row=per_row,
        attention_operations=tuple(attention),
        kv_bytes_per_token=tuple(g.bytes_per_token(kv_dtype) for g in graph.kv_groups),
    )


def op_weights(graph: Graph, op: Op) -> Iterator[tuple[WeightRef, int, int]]:
    """(reference, rows, columns) of each weight of one operation; vectors have one row."""
    width = graph.axes[graph.tensors[op.output][-1]]
    for ref in op.weights:
        if op.kind == "embed":
            yield ref, graph.axes["vocab"], width
        elif op.kind == "rms_norm":
            yield ref, 1, op.attrs["head_dim"] or width
        else:
            yield ref, width, graph.axes[graph.tensors[op.inputs[0]][-1]]
    if op.bias is not None:
        yield op.bias, 1, width


def kv_bytes(groups: tuple[KVGroup, ...], num_tokens: int, block_size: int, dtype: KVDtype = "bf16") -> int:
    """KV bytes that one sequence of `num_tokens` holds, in whole blocks.

    A windowed group keeps the blocks that the window touches: at most ceil((window - 1) / block_size) + 1.
    """
    total = 0
    for group in groups:
        blocks = -(-num_tokens // block_size)
        if group.kind == "window":
            blocks = min(blocks, -(-(group.window - 1) // block_size) + 1)
        total += blocks * block_size * group.bytes_per_token(dtype)
    return total
