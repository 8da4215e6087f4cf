"""Lowers a Graph to a native tape: packs the weights, lays out the buffers, writes the records.

What runs as one is decided in `fusion`; what the records do is told in csrc/tape.h. Here a tensor of the graph gets a
place to live: a buffer that is free again after the last operation that reads it, so that all layers share a handful.
This file knows no instruction set and no step.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import _C
from headrace.backend.base import BackendSpec
from headrace.backend.fusion import FLOAT_FORMATS, Fusion, LoweringError
from headrace.backend.weights import WeightPacker
from headrace.model.formats import FORMATS
from headrace.model.graph import Graph, Op
from headrace.model.planner import op_weights

STORE, ADD_TO, SWIGLU, GEGLU = range(4)  # EpilogueKind of csrc/kernels.h
_GATED = {"silu": SWIGLU, "gelu_tanh": GEGLU}
_LABELS = {"attn_q": "qkv", "attn_output": "output", "ffn_down": "down"}


@dataclass(slots=True)
class _Lease:
    """A buffer (Matrix or Activations) that is free again after operation `until`."""

    buffer: Any
    until: int


@dataclass(slots=True)
class _Buffers:
    """Buffers by kind and shape, reused when free."""

    leases: dict[tuple[object, ...], list[_Lease]] = field(default_factory=dict)

    def take(self, make: Any, shape: tuple[int | bool, ...], now: int, until: int) -> _Lease:
        """A buffer `make(*shape)` from operation `now` to the end of operation `until`."""
        known = self.leases.setdefault((make, *shape), [])
        lease = next((lease for lease in known if lease.until < now), None)
        if lease is None:
            lease = _Lease(make(*shape), until)
            known.append(lease)
        lease.until = until
        return lease


class Lowering:
    """One pass over a Graph. `tape`, `caches` (one per KV group) and `logits` [max_rows, vocab] are the result.

    Raises LoweringError for what it cannot run, ModelFileError for a tensor that is not as the graph says.
    """

    def __init__(self, graph: Graph, spec: BackendSpec, packer: WeightPacker, pool: _C.Pool, isa: str) -> None:
        self._graph = graph
        self._spec = spec
        self._packer = packer
        self._fusion = Fusion(graph)
        self._buffers = _Buffers()
        self._matrices: dict[str, tuple[_C.Matrix, _Lease]] = {}  # by tensor
        self._activations: dict[str, _C.Activations] = {}  # tensors in the form that GEMM reads
        self._head_norms: dict[str, Op] = {}  # by output: norms that the rope after them will do
        self._angles: dict[tuple[object, ...], _C.Matrix] = {}
        self._now = 0
        self.logits: _C.Matrix
        self.caches = [
            _C.KVCache(len(group.layers), blocks, spec.block_size, group.num_kv_heads, group.head_dim, spec.kv_dtype)
            for group, blocks in zip(graph.kv_groups, spec.num_blocks, strict=True)
        ]
        sizes = {"vocab": graph.axes["vocab"], "hidden": graph.axes["hidden"]}
        self.tape = _C.Tape(isa, pool, max_tokens=spec.max_tokens, max_rows=spec.max_rows, **sizes)
        for self._now, op in enumerate(graph.ops):
            self._lower(op)
        packer.pack()

    def _lower(self, op: Op) -> None:
        lower = {
            "embed": self._embed,
            "rms_norm": self._norm,
            "linear": self._linear,
            "rope": self._rope,
            "attention": self._attention,
            "gated_mlp": self._gated_mlp,
            "add": self._add,
            "select_rows": self._select_rows,
        }.get(op.kind)
        if lower is None:
            raise LoweringError(f"the CPU backend cannot run {op.kind} ({op.output})")
        lower(op)

    def _embed(self, op: Op) -> None:
        self.tape.label("embed")
        table = self._packer.table(op.weights[0])
        type_number = FORMATS[table.format].type_number
        self.tape.embed(table.data, type_number, table.shape[1], op.attrs["scale"], self._new_matrix(op.output))
        for rope in self._graph.ops:
            if rope.kind == "rope" and _angles_key(rope) not in self._angles:
                angles = _C.Matrix(self._spec.max_tokens, rope.attrs["rotary_dim"])
                self.tape.angles(list(rope.attrs["inv_freq"]), rope.attrs["scale"], angles)
                self._angles[_angles_key(rope)] = angles

    def _norm(self, op: Op) -> None:
        if op.attrs["head_dim"]:
            self._head_norms[op.output] = op
            self._alias(op.output, op.inputs[0])
            return
        self.tape.label("norm")
        x, gain, eps = self._matrix(op.inputs[0]), self._packer.vector(op.weights), op.attrs["eps"]
        add = self._fusion.add_after(op.output)
        if add is None:
            self._activations[op.output] = self._new_activations(op.output)
            rows = self._fusion.is_output_rows(op.output)
            self.tape.norm_quant(x, gain, eps, self._activations[op.output], rows)
        else:
            self.tape.norm_rows(x, gain, eps, self._matrix(add[0]), True, False)
            self._alias(add[1], add[0])

    def _linear(self, op: Op) -> None:
        if self._now in self._fusion.absorbed:
            return
        x = self._readable(op.inputs[0])
        rows = self._fusion.is_output_rows(op.output)
        self.tape.label("head" if rows else _LABELS.get(op.output.split(".")[-1], "linear"))
        group = [self._graph.ops[index] for index in self._fusion.siblings(self._now)]
        add = self._fusion.add_after(op.output) if len(group) == 1 else None
        weight, bias = self._packer.rows([member.weights[0] for member in group]), self._bias(group)
        if add is None:
            joins = self._fusion.joins_previous(self._now)
            self.tape.gemm(weight, x, self._new_columns(group), bias, STORE, rows, joins)
        else:
            self.tape.gemm(weight, x, self._matrix(add[0]), bias, ADD_TO)
            self._alias(op.output, add[0])
            self._alias(add[1], add[0])
        if op.output == self._graph.output:
            self._sample(op)

    def _bias(self, group: list[Op]) -> npt.NDArray[np.float32] | None:
        if all(op.bias is None for op in group):
            return None
        parts = [
            np.zeros(self._fusion.width(op.output), np.float32) if op.bias is None else self._packer.vector([op.bias])
            for op in group
        ]
        return np.concatenate(parts)

    def _sample(self, op: Op) -> None:
        logits = self._matrix(op.output)
        self.logits = logits
        self.tape.label("sample")
        if op.attrs["softcap"]:
            self.tape.softcap(logits, op.attrs["softcap"])
        self.tape.sample(logits)

    def _rope(self, op: Op) -> None:
        norm = self._head_norms.get(op.inputs[0])
        gain = None if norm is None else self._packer.vector(norm.weights)
        eps = 0.0 if norm is None else norm.attrs["eps"]
        self.tape.label("rope")
        angles = self._angles[_angles_key(op)]
        self.tape.head_norm_rope(self._matrix(op.inputs[0]), op.attrs["head_dim"], gain, eps, angles)
        self._alias(op.output, op.inputs[0])

    def _attention(self, op: Op) -> None:
        attrs = op.attrs
        if attrs["mask"] != "causal":
            raise LoweringError(f"the CPU backend knows causal attention only, not {attrs['mask']} ({op.output})")
        if attrs["head_dim"] % 16 or attrs["head_dim"] > 256:
            raise LoweringError(f"head_dim {attrs['head_dim']} is no multiple of 16 up to 256 ({op.output})")
        q, k, v = (self._matrix(tensor) for tensor in op.inputs)
        group, layer = attrs["kv_group"], attrs["layer"]
        masking = _C.Masking(attrs["scale"], attrs["softcap"], attrs["window"])
        self.tape.label("rope")
        self.tape.kv_write(k, v, self.caches[group], group, layer)
        self.tape.label("attention")
        self.tape.attention(q, self._new_matrix(op.output), self.caches[group], group, layer, masking)

    def _gated_mlp(self, op: Op) -> None:
        x = self._readable(op.inputs[0])
        epilogue = _GATED.get(op.attrs["activation"])
        if epilogue is None:
            raise LoweringError(f"the CPU backend knows no activation {op.attrs['activation']} ({op.output})")
        out = self._new_matrix(op.output)
        self.tape.label("gate_up")
        if self._fusion.interleaves(op):
            self.tape.gemm(self._packer.interleaved(*op.weights), x, out, None, epilogue)
            return
        gate, up = (self._packer.rows([ref]) for ref in op.weights)
        shape = (self._spec.max_tokens, self._fusion.width(op.output))
        second: _C.Matrix = self._buffers.take(_C.Matrix, shape, self._now, self._now).buffer
        self.tape.gemm(gate, x, out)
        self.tape.gemm(up, x, second, None, STORE, False, True)
        self.tape.gate(out, second, epilogue)

    def _add(self, op: Op) -> None:
        if op.output not in self._matrices:
            raise LoweringError(f"the CPU backend adds only what a linear or a norm gives ({op.output})")

    def _select_rows(self, op: Op) -> None:
        x = self._matrix(op.inputs[0])
        self.tape.label("head")
        self.tape.check_finite(x)
        self.tape.select(x, self._new_matrix(op.output))

    def _matrix(self, tensor: str) -> _C.Matrix:
        if tensor not in self._matrices:
            raise LoweringError(f"the CPU backend has {tensor} only in the form that a GEMM reads")
        return self._matrices[tensor][0]

    def _readable(self, tensor: str) -> _C.Activations:
        """A tensor as GEMM reads it; one that no norm has made so is quantised here."""
        if tensor not in self._activations:
            x = self._matrix(tensor)
            self.tape.label("norm")
            self._activations[tensor] = self._new_activations(tensor)
            rows = self._fusion.is_output_rows(tensor)
            self.tape.norm_quant(x, None, 0.0, self._activations[tensor], rows)
        return self._activations[tensor]

    def _capacity(self, tensor: str) -> int:
        return self._spec.max_rows if self._fusion.is_output_rows(tensor) else self._spec.max_tokens

    def _new_matrix(self, tensor: str) -> _C.Matrix:
        shape = (self._capacity(tensor), self._fusion.width(tensor))
        lease = self._buffers.take(_C.Matrix, shape, self._now, self._fusion.last_reader(tensor))
        self._matrices[tensor] = (lease.buffer, lease)
        return self._matrices[tensor][0]

    def _new_columns(self, group: list[Op]) -> _C.Matrix:
        """One matrix whose columns are the outputs of `group`, side by side."""
        if len(group) == 1:
            return self._new_matrix(group[0].output)
        widths = [self._fusion.width(op.output) for op in group]
        until = max(self._fusion.last_reader(op.output) for op in group)
        lease = self._buffers.take(_C.Matrix, (self._capacity(group[0].output), sum(widths)), self._now, until)
        whole: _C.Matrix = lease.buffer
        begin = 0
        for op, width in zip(group, widths, strict=True):
            self._matrices[op.output] = (whole.columns(begin, width), lease)
            begin += width
        return whole

    def _new_activations(self, tensor: str) -> _C.Activations:
        shape = (self._capacity(tensor), self._fusion.width(tensor), *self._fusion.reads(tensor))
        buffer: _C.Activations = self._buffers.take(
            _C.Activations, shape, self._now, self._fusion.last_reader(tensor)
        ).buffer
        return buffer

    def _alias(self, tensor: str, same: str) -> None:
        """`tensor` lives where `same` does: what made it worked in place."""
        matrix, lease = self._matrices[same]
        lease.until = max(lease.until, self._fusion.last_reader(tensor))
        self._matrices[tensor] = (matrix, lease)


def _angles_key(rope: Op) -> tuple[object, ...]:
    return (rope.attrs["inv_freq"], rope.attrs["scale"])


def packed_bytes(graph: Graph) -> int:
    """Bytes of all matrices as packed, and of the embedding table, whose rows stay as the file has them."""
    matrices: dict[tuple[str, str], int] = {}
    for op in graph.ops:
        for ref, rows, columns in op_weights(graph, op):
            fmt = FORMATS[ref.quant]
            stored = rows * fmt.row_bytes(columns)
            packed = _C.packed_bytes(fmt.type_number, rows, columns) if op.kind != "embed" and rows > 1 else stored
            matrices[op.kind, ref.name] = max(packed, stored)
    return sum(matrices.values())


def kernel_plan(graph: Graph, isa: str = "auto") -> list[str]:
    """For each operation of the graph, the kernel that runs it, or where it is fused into. For `headrace inspect`."""
    fusion = Fusion(graph)
    name = _C.Kernels(isa).name
    return [_describe(graph, fusion, index, name) for index in range(len(graph.ops))]


def _describe(graph: Graph, fusion: Fusion, index: int, isa: str) -> str:
    op = graph.ops[index]
    if op.kind == "rms_norm":
        if op.attrs["head_dim"]:
            return f"{isa} head_norm_rope"
        return f"{isa} norm_quant" if fusion.add_after(op.output) is None else f"{isa} norm_rows += residual"
    if op.kind == "linear":
        if index in fusion.absorbed:
            leader = max(i for i in range(index) if i not in fusion.absorbed)
            return f"in the GEMM of {graph.ops[leader].output.split('.')[-1]}"
        epilogue = "" if fusion.add_after(op.output) is None else " += residual"
        return f"{isa} gemm {_gemm_format(op.weights[0].quant)}{epilogue}"
    if op.kind == "gated_mlp":
        apart = "" if fusion.interleaves(op) else " apart"
        return f"{isa} gemm {_gemm_format(op.weights[0].quant)}, {op.attrs['activation']}{apart}"
    before = "norm" if graph.ops[index - 1].kind == "rms_norm" else "GEMM"
    fixed = {
        "embed": f"{isa} embed",
        "rope": f"{isa} head_norm_rope",
        "attention": f"{isa} kv_write, attention",
        "add": f"in the {before} before",
        "select_rows": "row copy",
    }
    return fixed.get(op.kind, "none: not supported")


def _gemm_format(quant: str) -> str:
    if quant in FLOAT_FORMATS:
        return f"{quant.lower()} x f32"
    return ("w4" if quant.startswith("Q4") else "w8") + " x int8"
