"""Drives a CpuBackend step by step without a scheduler: scattered blocks, chunks and batches as a test says."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.backend.base import BackendSpec
from headrace.backend.cpu import CpuBackend
from headrace.backend.pack_cache import PackCache
from headrace.core.batch import I32, Batch, StepResult
from headrace.core.batch_builder import ScheduledSequence, build_batch
from headrace.core.kv_cache import BlockCopy
from headrace.core.kv_group import KVDtype
from headrace.core.request import Request, SamplingParams
from headrace.model.checkpoint import Checkpoint
from headrace.model.decoder import build_graph

TOP = 8  # logprobs asked for: enough of a row to see a changed bit


def tiny_backend(
    checkpoint: Checkpoint,
    *,
    isa: str = "auto",
    threads: int = 1,
    num_blocks: int = 160,
    block_size: int = 32,
    max_tokens: int = 512,
    fill: int | None = None,
    kv_dtype: KVDtype = "bf16",
    cache: PackCache | None = None,
) -> CpuBackend:
    """`fill`: every 16-bit word of the KV caches, for example a NaN."""
    graph = build_graph(checkpoint.config, checkpoint)
    spec = BackendSpec(
        kv_groups=graph.kv_groups,
        num_blocks=(num_blocks,) * len(graph.kv_groups),
        block_size=block_size,
        vocab_size=checkpoint.config.vocab_size,
        max_tokens=max_tokens,
        max_rows=64,
        max_seqs=64,
        max_model_len=checkpoint.config.max_position,
        kv_dtype=kv_dtype,
    )
    backend = CpuBackend(graph, checkpoint, spec, isa=isa, threads=threads, cache=cache)
    if fill is not None:
        for group, cache in enumerate(backend.caches):
            words = np.full(cache.block_bytes // 2, fill, np.uint16).tobytes()
            for block in range(num_blocks):
                backend.write_blocks(group, np.array([block], np.int32), words)
    return backend


@dataclass
class Sequence:
    """A request with its blocks. `rows` collects, per sampled token, the bytes of its logprobs and signals."""

    request: Request
    tables: tuple[I32, ...]  # per group, for the whole context
    computed: int = 0
    rows: list[bytes] = field(default_factory=list)
    status: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.request.output_token_ids

    def scheduled(self, count: int, block_size: int) -> ScheduledSequence:
        blocks = -(-(self.computed + count) // block_size)
        return ScheduledSequence(self.request, self.computed, count, tuple(table[:blocks] for table in self.tables))


class Driver:
    def __init__(self, backend: CpuBackend, seed: int = 0) -> None:
        self.backend = backend
        self._free = [
            np.random.default_rng([seed, group]).permutation(count).astype(np.int32).tolist()
            for group, count in enumerate(backend.spec.num_blocks)
        ]
        self._step_id = 0

    def sequence(
        self, prompt: Seq[int], length: int, params: SamplingParams, prefix: Sequence | None = None
    ) -> Sequence:
        """Room for `length` tokens; the whole blocks that `prompt` shares with `prefix` are taken over as computed."""
        size = self.backend.spec.block_size
        shared = 0 if prefix is None else min(prefix.computed, len(prompt) - 1) // size
        tables = []
        for group, free in enumerate(self._free):
            own = [free.pop() for _ in range(-(-length // size) - shared)]
            old = [] if prefix is None else prefix.tables[group][:shared].tolist()
            tables.append(np.array(old + own, np.int32))
        request = Request(f"r{len(self._free[0])}", list(prompt), params, 0)
        return Sequence(request, tuple(tables), computed=shared * size)

    def step(self, work: Seq[tuple[Sequence, int]], copies: Seq[BlockCopy] = ()) -> StepResult:
        """Computes `count` tokens of each sequence, samples where one is complete, and notes what came."""
        items = [sequence.scheduled(count, self.backend.spec.block_size) for sequence, count in work]
        result = self.compute(items, copies)
        row = 0
        for s, (sequence, count) in enumerate(work):
            sequence.computed += count
            sequence.status |= int(result.status[s])
            tokens = result.token_ids[result.cu_tokens[s] : result.cu_tokens[s + 1]].tolist()
            if items[s].has_sample_row:
                width = 1 + sequence.request.params.logprobs if sequence.request.params.logprobs is not None else 0
                numbers: npt.NDArray[np.float32] = result.logprobs[row, :width]
                sequence.rows.append(numbers.tobytes() + result.signals[row].tobytes())
            row += items[s].num_rows
            sequence.request.output_token_ids.extend(tokens)
        return result

    def compute(self, items: Seq[ScheduledSequence], copies: Seq[BlockCopy] = ()) -> StepResult:
        self.backend.submit(self.batch(items, copies))
        return self.backend.collect()

    def batch(self, items: Seq[ScheduledSequence], copies: Seq[BlockCopy] = ()) -> Batch:
        spec = self.backend.spec
        self._step_id += 1
        return build_batch(self._step_id, items, spec.block_size, copies, spec.vocab_size)

    def finish(self, sequences: Seq[Sequence], num_tokens: int, chunk: int = 512) -> None:
        """Steps all of them together, up to `chunk` tokens each, until each has `num_tokens` output tokens."""
        while True:
            work = [(s, min(chunk, s.request.num_tokens - s.computed)) for s in sequences if len(s.tokens) < num_tokens]
            if not work:
                return
            self.step(work)


GREEDY = SamplingParams(max_tokens=1000, temperature=0.0, logprobs=TOP)
SEEDED = SamplingParams(max_tokens=1000, temperature=0.9, top_p=0.95, top_k=40, seed=7, logprobs=TOP)


def random_prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng([seed, length]).integers(0, vocab_size, length).tolist()
    return tokens
