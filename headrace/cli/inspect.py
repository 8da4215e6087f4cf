"""`headrace inspect MODEL`: what a model is and what serving it takes, before any of it runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from headrace.base.config import cache_dir, option
from headrace.base.errors import ModelTooLargeError
from headrace.cli.options import Command, Positional, read
from headrace.cli.progress import ProgressLine

if TYPE_CHECKING:
    from headrace.base.config import Config
    from headrace.model.config import ModelConfig
    from headrace.model.graph import Graph, Op


@dataclass(frozen=True)
class InspectOptions:
    """What to show."""

    full: bool = option(False, "Print every operation, not one line for equal layers.")


COMMAND = Command(
    "inspect",
    "Show a model's graph, parameters, bytes and operations per token, quantisation, kernels and memory plan.",
    InspectOptions,
    (Positional("model", "catalog name, path or hub id; smollm2-135m when absent"),),
    (
        "model",
        "cache_dir",
        "isa",
        "block_size",
        "kv_cache_dtype",
        "max_model_len",
        "max_num_seqs",
        "kv_cache_memory_bytes",
    ),
)


def main(arguments: Sequence[str]) -> int:
    given = read(COMMAND, arguments)
    from headrace.backend.lower import kernel_plan
    from headrace.cli.cached import say_licence
    from headrace.model.checkpoint import open_checkpoint
    from headrace.model.decoder import build_graph
    from headrace.model.fetch import resolve_model

    say_licence(given.config)
    with ProgressLine() as line:
        path = resolve_model(given.config.model, cache_dir(given.config.cache_dir), line.report)
    checkpoint = open_checkpoint(path)
    try:
        graph = build_graph(checkpoint.config, checkpoint)
        print("\n".join(_model_lines(checkpoint.config, path)))
        print("\n".join(_size_lines(graph, checkpoint.config, given.config)))
        print("\n".join(_plan_lines(given.config, checkpoint.config, graph)))
        print("\ngraph")
        print("\n".join(_graph_lines(graph, kernel_plan(graph, given.config.isa), given.own.full)))
    finally:
        checkpoint.close()
    return 0


def _model_lines(config: "ModelConfig", path: object) -> Iterator[str]:
    yield f"model         {config.name} ({config.family})"
    yield f"file          {path}"
    yield (
        f"shape         {config.num_layers} layers, hidden {config.hidden_size}, {config.num_heads} heads of "
        f"{config.head_dim} on {config.num_kv_heads} KV heads, MLP {config.intermediate_size}, "
        f"vocabulary {config.vocab_size}"
    )
    windows = sum(config.window_pattern)
    window = f"; {windows} layers see a window of {config.sliding_window}" if windows else ""
    yield f"context       {config.max_position} tokens, rope base {config.rope_base:g}{window}"


def _size_lines(graph: "Graph", config: "ModelConfig", settings: "Config") -> Iterator[str]:
    from headrace.engine.launch import kv_dtype
    from headrace.model.planner import kv_bytes, measure_graph

    dtype = kv_dtype(settings)
    size = measure_graph(graph, dtype)
    formats = ", ".join(f"{name} {count / 1e6:,.1f} MB" for name, count in sorted(size.bytes_by_format.items()))
    yield f"parameters    {size.parameters / 1e6:,.1f} million"
    yield f"weights       {size.weight_bytes / 1e6:,.1f} MB as stored: {formats}"
    head = f"{size.operations_per_row / 1e6:,.1f} million more for each that is sampled"
    yield f"operations    {size.operations_per_token / 1e6:,.1f} million per token, {head}"
    for group, operations, kv in zip(graph.kv_groups, size.attention_operations, size.kv_bytes_per_token, strict=True):
        seen = f"window of {group.window}" if group.kind == "window" else "all positions"
        yield (
            f"attention     {len(group.layers)} layers over {seen}: {operations / 1e3:,.1f} thousand operations "
            f"per attended position, {kv:,} {dtype} KV bytes per token"
        )
    for tokens in sorted({1024, 8192, config.max_position}):
        if tokens <= config.max_position:
            held = kv_bytes(graph.kv_groups, tokens, settings.block_size, dtype)
            yield f"memory plan   {held / 1e6:,.1f} MB of {dtype} KV cache for a context of {tokens:,} tokens"


def _plan_lines(settings: "Config", config: "ModelConfig", graph: "Graph") -> Iterator[str]:
    """What `headrace serve` would give the model here and now."""
    from headrace.engine.launch import plan_memory, size_summary

    try:
        sizes = plan_memory(settings, config, graph)
    except ModelTooLargeError as error:
        yield f"here          {error}"
        return
    for label, text in size_summary(settings, sizes, settings.max_num_seqs).items():
        yield f"{'here: ' + label:<13} {text}"


def _graph_lines(graph: "Graph", kernels: "Sequence[str]", full: bool) -> Iterator[str]:
    """One line per operation; runs of equal layers are shown once with how many there are."""
    described = [(op, kernel) for op, kernel in zip(graph.ops, kernels, strict=True)]
    if full:
        yield from (_line(op, kernel) for op, kernel in described)
        return
    layers = [list(items) for _, items in groupby(described, key=lambda item: _layer(item[0]))]
    runs = [list(items) for _, items in groupby(layers, key=lambda layer: [_shape(op) for op, _ in layer])]
    for run in runs:
        first, last = _layer(run[0][0][0]), _layer(run[-1][0][0])
        if len(run) > 1:
            yield f"  layers {first} to {last}, {len(run)} alike:"
        elif first is not None:
            yield f"  layer {first}:"
        yield from (_line(op, kernel) for op, kernel in run[0])


def _layer(op: "Op") -> int | None:
    parts = op.output.split(".")
    return int(parts[1]) if parts[0] == "blk" else None


def _shape(op: "Op") -> tuple[object, ...]:
    attrs = tuple(sorted((name, str(value)) for name, value in op.attrs.items() if name != "layer"))
    return (op.kind, tuple(ref.quant for ref in op.weights), op.bias is not None, attrs)


def _line(op: "Op", kernel: str) -> str:
    weights = ", ".join(f"{ref.name} {ref.quant}" for ref in op.weights)
    return f"    {op.kind:<12} {op.output:<24} {kernel:<34} {weights}".rstrip()
