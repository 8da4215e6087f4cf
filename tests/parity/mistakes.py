"""Mistakes that an engine could make, as changes of a tiny model's graph. A comparison must notice each of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.model.checkpoint import FileCheckpoint
from headrace.model.config import RopeScaling
from headrace.model.decoder import build_graph
from headrace.model.graph import Graph, WeightRef

Mistake = Callable[[FileCheckpoint, Graph], Graph]


def attrs(kind: str, **changes: Any) -> Mistake:
    def apply(checkpoint: FileCheckpoint, graph: Graph) -> Graph:
        ops = [replace(op, attrs=op.attrs | changes) if op.kind == kind else op for op in graph.ops]
        return replace(graph, ops=tuple(ops))

    return apply


def untransformed(checkpoint: FileCheckpoint, graph: Graph) -> Graph:
    def plain(ref: WeightRef) -> WeightRef:
        return replace(ref, transform="")

    return replace(graph, ops=tuple(replace(op, weights=tuple(map(plain, op.weights))) for op in graph.ops))


def unbiased(checkpoint: FileCheckpoint, graph: Graph) -> Graph:
    return replace(graph, ops=tuple(replace(op, bias=None) for op in graph.ops))


def reconfigured(**changes: Any) -> Mistake:
    def apply(checkpoint: FileCheckpoint, graph: Graph) -> Graph:
        return build_graph(replace(checkpoint.config, **changes), checkpoint)

    return apply


MISTAKES: dict[str, tuple[str, Mistake]] = {
    "window one too wide": ("mistral", attrs("attention", window=21)),
    "no window": ("mistral", attrs("attention", window=0)),
    "gemma: global layers windowed": ("gemma3", attrs("attention", window=16)),
    "gemma: local layers with the global base": ("gemma3", reconfigured(rope_base_local=0.0)),
    "gemma: query scale from the head size": ("gemma3", reconfigured(attention_scale=0.0)),
    "gemma: embedding not scaled": ("gemma3", attrs("embed", scale=1.0)),
    "gemma: gains without their one": ("gemma3", untransformed),
    "gemma: silu": ("gemma3", attrs("gated_mlp", activation="silu")),
    "llama3: rope not scaled": ("llama3", reconfigured(rope_scaling=RopeScaling())),
    "yarn: cosine not scaled": ("llama_yarn", attrs("rope", scale=1.0)),
    "yarn: no biases": ("llama_yarn", unbiased),
    "qwen2: no biases": ("qwen2", unbiased),
    "qwen3: a large epsilon": ("qwen3", attrs("rms_norm", eps=1e-2)),
    "wrong base": ("smollm2", reconfigured(rope_base=10000.0)),
}
