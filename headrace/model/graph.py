"""A model, described once: a flat list of about fifteen kinds of operation over named tensors.

The CPU backend lowers a Graph to a native tape, the torch backend runs it, `headrace inspect` prints it and the planner
counts its bytes and operations. A Graph holds no weights, only references to them.

Operations (inputs -> output; `T` tokens, `R` output rows):
    embed(input_ids[T]) -> [T, hidden]            weights (table,); attrs scale: float
    rms_norm(x) -> x                              weights (gain,); attrs eps, head_dim (0: whole last axis; else each
                                                  head apart)
    linear(x[.., K]) -> [.., N]                   weights (w[N, K],); bias; attrs softcap: float (0 off, head only)
    rope(x[T, heads*head_dim]) -> same            attrs head_dim, rotary_dim, inv_freq: tuple[float, ...]
                                                  (rotary_dim/2), scale: float (cos and sin are multiplied by it).
                                                  Half-split pairs (i, i + rotary_dim/2): checkpoints that interleave
                                                  pairs are permuted by their WeightRef.transform.
    attention(q, k, v) -> [T, heads*head_dim]     attrs kv_group, layer (index inside the group), num_heads,
                                                  num_kv_heads, head_dim, scale, window (0: none; else position p sees
                                                  the keys in (p - window, p]), softcap (0: none), mask
    gated_mlp(x[T, K]) -> [T, intermediate]       weights (gate, up); attrs activation: "silu" | "gelu_tanh"
    add(x, y) -> x
    select_rows(x, output_rows) -> [R, hidden]
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.core.kv_group import KVGroup

OpKind = Literal[
    "embed", "rms_norm", "layer_norm", "linear", "rope", "attention", "gated_mlp", "add", "moe", "select_rows"
]
Shard = Literal["column", "row", "vocab", "expert"]


@dataclass(frozen=True, slots=True)
class WeightRef:
    """Names a checkpoint tensor and the exact transform from storage to use.

    Transforms (all exact on quantised rows):
        ""                     as stored
        "rope_permute:H"       rows of H heads stored with interleaved rope pairs -> half-split pairs
        "add_one"              1-D gains stored as (gain - 1)
    """

    name: str
    transform: str = ""
    quant: str = ""  # storage format as found in the checkpoint ("Q4_1", "BF16", ...), for planner and inspect


@dataclass(frozen=True, slots=True)
class Op:
    kind: OpKind
    inputs: tuple[str, ...]
    output: str
    weights: tuple[WeightRef, ...] = ()
    bias: WeightRef | None = None
    shard: Shard | None = None
    adapter_key: str | None = None
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Graph:
    ops: tuple[Op, ...]
    tensors: dict[str, tuple[str, ...]]  # tensor name -> axis names
    axes: dict[str, int]  # axis name -> size, for every axis that is not per-step ("tokens", "rows")
    kv_groups: tuple[KVGroup, ...]
    output: str = "logits"
