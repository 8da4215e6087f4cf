"""CpuBackend: Batches through the native tape.

    submit (queue it)  ->  collect: block copies, token sources, one native call with the GIL released, StepResult

A step runs when it is collected, so masks may come until then. It holds the packed weights, the KV caches and the
threads; it knows no requests. A step that contradicts itself raises BatchError before anything is computed; a sequence
whose numbers are not finite gets a status and disturbs no other.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from headrace import _C
from headrace.backend.base import BackendSpec
from headrace.backend.lower import Lowering
from headrace.backend.pack_cache import PackCache
from headrace.backend.threads import default_threads
from headrace.backend.weights import Progress, WeightPacker
from headrace.base.clock import Clock, SystemClock
from headrace.base.errors import ConfigError, HeadraceError
from headrace.core.batch import Batch, BatchError, StepResult
from headrace.model.checkpoint import Checkpoint
from headrace.model.graph import Graph

MAX_IN_FLIGHT = 2
_NO_HIDDEN = np.empty((0, 0), np.float32)


class CpuBackendError(HeadraceError):
    """A call against the protocol of Backend."""


class CpuBackend:
    """`threads` 0 takes what the machine grants; `isa` "auto" the best that it can run.

    `cache` keeps packed weights on disk.

    Raises LoweringError, ModelFileError, or ConfigError for an instruction set that this machine lacks.
    """

    def __init__(
        self,
        graph: Graph,
        checkpoint: Checkpoint,
        spec: BackendSpec,
        *,
        threads: int = 0,
        isa: str = "auto",
        progress: Progress | None = None,
        clock: Clock | None = None,
        cache: PackCache | None = None,
    ) -> None:
        self._spec = spec
        self._clock = clock or SystemClock()
        available = _C.instruction_sets()
        if isa not in ("auto", *available):
            raise ConfigError(f"isa: this machine cannot run {isa}; it can run {', '.join(available)}")
        self.isa: str = available[0] if isa == "auto" else isa
        granted = default_threads()
        self.threads = threads or granted
        pool = _C.Pool(self.threads, spin=self.threads <= granted)
        self._cache = cache
        packer = WeightPacker(graph, checkpoint, pool, self.isa, progress, cache)
        lowering = Lowering(graph, spec, packer, pool, self.isa)
        self.tape: _C.Tape = lowering.tape
        self.caches: list[_C.KVCache] = lowering.caches
        self._logits = lowering.logits
        self._submitted: deque[Batch] = deque()
        self._masks: dict[int, npt.NDArray[np.int32]] = {}
        self._previous_rows = np.empty(0, np.int32)  # tokens by output row of the step before
        self._closed = False

    @property
    def spec(self) -> BackendSpec:
        return self._spec

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """float32 [max_rows, vocab]: what the rows of the step last collected were chosen from, until the next one.

        A view. Rows are in the order of `Batch.output_rows`; those past the step's number of rows mean nothing.
        """
        return np.asarray(self._logits.array)

    @property
    def phase_names(self) -> list[str]:
        """What StepResult.phase_ns counts."""
        return list(self.tape.labels)

    def submit(self, batch: Batch) -> None:
        if self._closed:
            raise CpuBackendError("the backend is closed")
        if len(self._submitted) == MAX_IN_FLIGHT:
            raise CpuBackendError(f"{MAX_IN_FLIGHT} steps are in flight: collect comes before the next submit")
        spec = self._spec
        over = batch.num_tokens > spec.max_tokens or batch.num_rows > spec.max_rows or batch.num_seqs > spec.max_seqs
        if over:
            raise BatchError(f"step {batch.step_id} is larger than the backend's spec")
        self._submitted.append(batch)

    def set_masks(self, step_id: int, bits: npt.NDArray[np.int32]) -> None:
        self._masks[step_id] = np.ascontiguousarray(bits, np.int32)

    def collect(self) -> StepResult:
        if not self._submitted:
            raise CpuBackendError("no step is in flight")
        batch = self._submitted.popleft()
        masks = self._masks.pop(batch.step_id, None)
        started_ns = self._clock.now_ns()
        try:
            for group, source, destination in batch.block_copies.tolist():
                self.caches[group].copy(source, destination)
            outputs = self.tape.run(self.caches, batch, self._previous_rows, masks)
        except (ValueError, TypeError, IndexError) as error:
            raise BatchError(f"step {batch.step_id}: {error}") from error
        rows, tokens, cu_tokens, accepted, logprobs, top_ids, signals, status, phase_ns = outputs
        self._previous_rows = rows
        return StepResult(
            step_id=batch.step_id,
            token_ids=tokens,
            cu_tokens=cu_tokens,
            num_accepted=accepted,
            logprobs=logprobs,
            top_ids=top_ids,
            signals=signals,
            status=status,
            hidden=_NO_HIDDEN,
            started_ns=started_ns,
            ended_ns=self._clock.now_ns(),
            phase_ns=phase_ns,
        )

    def read_blocks(self, group: int, ids: npt.NDArray[np.int32]) -> bytes:
        """Whole blocks, one after another: for each layer of the group its keys, then its values."""
        return self.caches[group].read(np.ascontiguousarray(ids, np.int32))

    def write_blocks(self, group: int, ids: npt.NDArray[np.int32], data: bytes) -> None:
        self.caches[group].write(np.ascontiguousarray(ids, np.int32), data)

    def close(self) -> None:
        """Forgets the steps in flight. Threads and memory go with the object."""
        self._closed = True
        self._submitted.clear()
        if self._cache is not None:
            self._cache.close()
