"""Runs a Graph with plain NumPy: the slowest reading of model/graph.py, in which nothing is clever.

One sequence, all positions at once, no KV cache. It proves the graph and the checkpoint against the goldens without any
kernel, serves as the second opinion for a backend, and as float32 it is what `headrace quality` measures against.
`dtype` is float64 where rounding must not matter.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.model.checkpoint import Checkpoint
from headrace.model.graph import Graph, Op, WeightRef
from headrace.model.quantize import dequantize

Array = npt.NDArray[Any]


class NumpyExecutor:
    """Dequantises every weight once; `logits` may then be called for many sequences."""

    def __init__(self, graph: Graph, checkpoint: Checkpoint, dtype: npt.DTypeLike = np.float64) -> None:
        self.graph = graph
        self.dtype = np.dtype(dtype)
        self._checkpoint = checkpoint
        self._weights: dict[WeightRef, Array] = {}
        for op in graph.ops:
            for ref in (*op.weights, *([op.bias] if op.bias else [])):
                if ref not in self._weights:
                    self._weights[ref] = self._load(ref)

    def _load(self, ref: WeightRef) -> Array:
        weight = self._checkpoint.weight(ref)
        return dequantize(weight.data, weight.format).reshape(weight.shape).astype(self.dtype)

    def logits(self, input_ids: Sequence[int], output_rows: Sequence[int] | None = None) -> Array:
        """Logits [rows, vocab] of the positions `output_rows` (all when None) of one sequence."""
        rows = range(len(input_ids)) if output_rows is None else output_rows
        tensors: dict[str, Array] = {"input_ids": np.asarray(input_ids), "output_rows": np.asarray(rows)}
        for op in self.graph.ops:
            inputs = [tensors[name] for name in op.inputs]
            weights = [self._weights[ref] for ref in op.weights]
            tensors[op.output] = getattr(self, f"_{op.kind}")(op, inputs, weights)
        return tensors[self.graph.output]

    def _embed(self, op: Op, inputs: list[Array], weights: list[Array]) -> Array:
        rows: Array = weights[0][inputs[0]] * op.attrs["scale"]
        return rows

    def _rms_norm(self, op: Op, inputs: list[Array], weights: list[Array]) -> Array:
        x = inputs[0]
        heads = x.reshape(len(x), -1, op.attrs["head_dim"] or x.shape[1])
        scale = 1 / np.sqrt((heads * heads).mean(axis=-1, keepdims=True) + op.attrs["eps"])
        y: Array = (heads * scale * weights[0]).reshape(x.shape)
        return y.astype(self.dtype)

    def _linear(self, op: Op, inputs: list[Array], weights: list[Array]) -> Array:
        y = inputs[0] @ weights[0].T
        if op.bias is not None:
            y = y + self._weights[op.bias]
        cap = op.attrs["softcap"]
        return cap * np.tanh(y / cap) if cap else y

    def _rope(self, op: Op, inputs: list[Array], weights: list[Array]) -> Array:
        x, half = inputs[0], op.attrs["rotary_dim"] // 2
        # The angle is a float32 product in every implementation, whatever follows it.
        angle = np.arange(len(x), dtype=np.float32)[:, None] * np.asarray(op.attrs["inv_freq"], dtype=np.float32)
        cos = np.cos(angle.astype(self.dtype))[:, None] * op.attrs["scale"]
        sin = np.sin(angle.astype(self.dtype))[:, None] * op.attrs["scale"]
        heads = x.reshape(len(x), -1, op.attrs["head_dim"])
        low, high, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1).reshape(x.shape)

    def _attention(self, op: Op, inputs: list[Array], weights: list[Array]) -> Array:
        a, tokens = op.attrs, len(inputs[0])
        q, k, v = (x.reshape(tokens, -1, a["head_dim"]).swapaxes(0, 1) for x in inputs)
        repeat = a["num_heads"] // a["num_kv_heads"]
        scores = q @ np.repeat(k, repeat, axis=0).swapaxes(1, 2) * a["scale"]
        if a["softcap"]:
            scores = a["softcap"] * np.tanh(scores / a["softcap"])
        distance = np.arange(tokens)[:, None] - np.arange(tokens)[None]
        hidden = (distance < 0) | ((distance >= a["window"]) if a["window"] else False)
        scores = np.where(hidden, -np.inf, scores)
        weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weight /= weight.sum(axis=-1, keepdims=True)
        out = weight @ np.repeat(v, repeat, axis=0)
        rows: Array = out.swapaxes(0, 1).reshape(tokens, -1)
        return rows.astype(self.dtype)

    def _gated_mlp(self, op: Op, inputs: list[Array], weights: list[Array]) -> Array:
        gate, up = inputs[0] @ weights[0].T, inputs[0] @ weights[1].T
        if op.attrs["activation"] == "silu":
            # The exponent is clipped where float32 would overflow; the result there is 0 either way.
            silu: Array = gate / (1 + np.exp(np.minimum(-gate, 80))) * up
            return silu
        inner = np.sqrt(2 / np.pi).astype(self.dtype) * (gate + 0.044715 * gate**3)
        gelu: Array = 0.5 * gate * (1 + np.tanh(inner)) * up
        return gelu

    def _add(self, op: Op, inputs: list[Array], weights: list[Array]) -> Array:
        total: Array = inputs[0] + inputs[1]
        return total

    def _select_rows(self, op: Op, inputs: list[Array], weights: list[Array]) -> Array:
        rows: Array = inputs[0][inputs[1]]
        return rows
