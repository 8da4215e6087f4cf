"""Quality: how far the backend's next-token distributions are from float32 arithmetic, on real text.

    text -> windows of token ids -> logits of both models at every position -> KL(reference, candidate), losses

The reference is NumPy in float32 on dequantised weights. Logits are compared window by window and reduced at once, so
memory holds one window of them. It knows no file of text and no command line.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.backend.base import BackendSpec
from headrace.backend.cpu import CpuBackend
from headrace.base.errors import HeadraceError
from headrace.core.batch_builder import ScheduledSequence, build_batch
from headrace.core.kv_group import KVDtype
from headrace.core.request import Request, SamplingParams
from headrace.model.checkpoint import Checkpoint
from headrace.model.decoder import build_graph
from headrace.model.numpy_executor import NumpyExecutor

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_BLOCK_SIZE = 32
_CHUNK = 128  # tokens of a step, and rows compared at once: 130 MB of logits for a vocabulary of 262,144
GATE_KL = 0.002
GATE_PERPLEXITY = 0.003


class QualityError(HeadraceError):
    """There is nothing to compare, or a model gave numbers that are not finite."""


@dataclass(frozen=True)
class Comparison:
    """One entry per predicted token, in nats."""

    kl: F64
    reference_loss: F64
    loss: F64
    agrees: npt.NDArray[np.bool_]  # whether both find the same token most likely

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def reference_perplexity(self) -> float:
        return float(np.exp(self.reference_loss.mean()))

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss.mean()))

    @property
    def perplexity_change(self) -> float:
        """Relative: 0.003 is 0.3 % worse than the reference."""
        return float(np.expm1(self.loss.mean() - self.reference_loss.mean()))

    @property
    def passes(self) -> bool:
        """The gate of the default path: mean KL below 0.002 and perplexity within 0.3 %."""
        return self.mean_kl < GATE_KL and abs(self.perplexity_change) < GATE_PERPLEXITY


def join(parts: Sequence[Comparison]) -> Comparison:
    """All tokens of `parts`. Raises QualityError when there are none."""
    if not parts:
        raise QualityError("the text is shorter than two tokens: nothing can be predicted")
    return Comparison(
        np.concatenate([part.kl for part in parts]),
        np.concatenate([part.reference_loss for part in parts]),
        np.concatenate([part.loss for part in parts]),
        np.concatenate([part.agrees for part in parts]),
    )


def windows(ids: Sequence[int], length: int, prefix: Sequence[int] = ()) -> list[list[int]]:
    """Consecutive windows of at most `length` ids, each behind `prefix` (the begin token where a model has one)."""
    step = length - len(prefix)
    parts = [[*prefix, *ids[start : start + step]] for start in range(0, len(ids), step)]
    return [part for part in parts if len(part) > 1]


class BackendLogits:
    """The CPU backend with room for one window at a time."""

    def __init__(
        self, checkpoint: Checkpoint, window: int, threads: int = 0, isa: str = "auto", kv_dtype: KVDtype = "bf16"
    ) -> None:
        graph = build_graph(checkpoint.config, checkpoint)
        blocks = -(-window // _BLOCK_SIZE)
        spec = BackendSpec(
            kv_groups=graph.kv_groups,
            num_blocks=(blocks,) * len(graph.kv_groups),
            block_size=_BLOCK_SIZE,
            vocab_size=graph.axes["vocab"],
            max_tokens=_CHUNK,
            max_rows=_CHUNK,
            max_seqs=1,
            max_model_len=window,
            kv_dtype=kv_dtype,
        )
        self._backend = CpuBackend(graph, checkpoint, spec, threads=threads, isa=isa)
        self._tables = tuple(np.arange(blocks, dtype=np.int32) for _ in graph.kv_groups)

    def chunks(self, ids: Sequence[int]) -> Iterator[F32]:
        """Logits [rows, vocab] of positions 0 to len(ids) - 2, in order; a view until the next. Raises QualityError."""
        request = Request("quality", list(ids), SamplingParams(prompt_logprobs=0, max_tokens=1), arrival_ns=0)
        vocab = self._backend.spec.vocab_size
        for step, start in enumerate(range(0, len(ids) - 1, _CHUNK)):
            count = min(_CHUNK, len(ids) - 1 - start)
            sequence = ScheduledSequence(request, start, count, self._tables, first_row=0, samples=False)
            self._backend.submit(build_batch(step, [sequence], _BLOCK_SIZE, (), vocab))
            if self._backend.collect().status.any():
                raise QualityError("the backend gave numbers that are not finite")
            yield self._backend.logits[:count]


class ExecutorLogits:
    """Float32 arithmetic on the weights of another checkpoint: what those weights alone cost."""

    def __init__(self, executor: NumpyExecutor) -> None:
        self._executor = executor

    def chunks(self, ids: Sequence[int]) -> Iterator[F32]:
        """As BackendLogits.chunks, in one piece."""
        yield self._executor.logits(ids, range(len(ids) - 1))


def compare(
    reference: NumpyExecutor,
    candidate: BackendLogits | ExecutorLogits,
    texts: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """All positions of all windows. `progress` hears (windows done, windows in all). Raises QualityError."""
    parts = []
    for done, ids in enumerate(texts):
        expected = reference.logits(ids, range(len(ids) - 1))
        start = 0
        for logits in candidate.chunks(ids):
            end = start + len(logits)
            parts.append(compare_logits(expected[start:end], logits, np.asarray(ids[start + 1 : end + 1])))
            start = end
        if progress is not None:
            progress(done + 1, len(texts))
    return join(parts)


def compare_logits(expected: F32, logits: F32, targets: npt.NDArray[np.int64]) -> Comparison:
    """float32 [rows, vocab] of both, and the token that follows each row."""
    p, q = _log_softmax(expected), _log_softmax(logits)
    rows = np.arange(len(targets))
    kl = (np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64)
    agrees = expected.argmax(axis=1) == logits.argmax(axis=1)
    return Comparison(kl, -p[rows, targets].astype(np.float64), -q[rows, targets].astype(np.float64), agrees)


def _log_softmax(logits: F32) -> F32:
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    result: F32 = shifted - np.log(total).astype(np.float32)
    return result
