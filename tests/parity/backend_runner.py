"""Teacher-forces a sequence through a Backend, in chunks, and reads the logprobs of the rows that a golden has.

The rows are asked for as prompt logprobs: the golden's own tokens are part of the prompt, so one mistake cannot change
what follows it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from agreement import Agreement, Golden

from headrace.backend.base import Backend, BackendSpec
from headrace.backend.cpu import CpuBackend
from headrace.core.batch_builder import ScheduledSequence, build_batch
from headrace.core.request import Request, SamplingParams
from headrace.model.checkpoint import open_checkpoint
from headrace.model.decoder import build_graph
from headrace.model.graph import Graph

TOP = 20  # more than is compared, so that small differences do not push a golden's tokens off the end
COMPARED = 16
Array = npt.NDArray[Any]


def spec_for(graph: Graph, *, max_model_len: int, block_size: int = 32, max_tokens: int = 128) -> BackendSpec:
    """Room for one sequence."""
    blocks = -(-max_model_len // block_size)
    return BackendSpec(
        kv_groups=graph.kv_groups,
        num_blocks=(blocks,) * len(graph.kv_groups),
        block_size=block_size,
        vocab_size=graph.axes["vocab"],
        max_tokens=max_tokens,
        max_rows=max_tokens,
        max_seqs=4,
        max_model_len=max_model_len,
    )


def open_backend(path: Path, *, max_model_len: int, graph: Graph | None = None) -> CpuBackend:
    """The CPU backend of a model file on two threads; `graph` replaces the model's own."""
    checkpoint = open_checkpoint(path)
    graph = graph or build_graph(checkpoint.config, checkpoint)
    return CpuBackend(graph, checkpoint, spec_for(graph, max_model_len=max_model_len), threads=2)


@dataclass(frozen=True)
class Rows:
    """One entry per golden row: logprob of the golden's token, our most likely ids and their logprobs (descending)."""

    target: Array  # f32 [N]
    ids: Array  # i32 [N, TOP]
    logprobs: Array  # f32 [N, TOP]


def forced_rows(backend: Backend, golden: Golden, *, chunk: int) -> Rows:
    ids = [*golden.prompt, *golden.tokens]
    request = Request("golden", ids, SamplingParams(prompt_logprobs=TOP, max_tokens=1), arrival_ns=0)
    spec = backend.spec
    tables = tuple(np.arange(-(-len(ids) // spec.block_size), dtype=np.int32) for _ in spec.kv_groups)
    target, top_ids, logprobs = [], [], []
    for step, start in enumerate(range(0, len(ids) - 1, chunk)):
        count = min(chunk, len(ids) - 1 - start)
        sequence = ScheduledSequence(request, start, count, tables, first_row=len(golden.prompt) - 1, samples=False)
        backend.submit(build_batch(step, [sequence], spec.block_size, (), spec.vocab_size))
        result = backend.collect()
        if result.status.any():
            raise ValueError(f"the backend reports status {result.status.tolist()} in step {step}")
        target.append(result.logprobs[:, 0])
        top_ids.append(result.top_ids[:, :TOP])
        logprobs.append(result.logprobs[:, 1 : TOP + 1])
    with_rows = [i for i, values in enumerate(target) if len(values)]
    return Rows(*(np.concatenate([part[i] for i in with_rows]) for part in (target, top_ids, logprobs)))


def agree(golden: Golden, rows: Rows) -> Agreement:
    """Compares the golden's 16 largest logprobs. One that fell out of our top counts with the smallest of that top."""
    expected = golden.top_logits[:, :COMPARED] - golden.logsumexp[:, None]
    found = golden.top_ids[:, :COMPARED, None] == rows.ids[:, None, :]
    place = np.where(found.any(axis=2), found.argmax(axis=2), TOP - 1)
    ours = np.take_along_axis(rows.logprobs, place, axis=1)
    difference = ours - expected
    flips = [
        float(margin)
        for best, token, margin in zip(rows.ids[:, 0], golden.tokens, golden.margins, strict=True)
        if best != token
    ]
    return Agreement(float(np.abs(difference).max()), float(np.sqrt((difference**2).mean())), flips)
