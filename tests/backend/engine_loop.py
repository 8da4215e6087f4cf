"""The whole decision side over a CpuBackend in this process: scheduler, KV manager, batches, native steps, results."""

from collections.abc import Sequence

from headrace.backend.base import BackendSpec
from headrace.backend.cpu import CpuBackend
from headrace.core.events import Event, EventKind, EventRecorder
from headrace.core.kv_cache import KVCacheManager
from headrace.core.outputs import StepOutputs, TokenLogprob
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.scheduler import Scheduler, StepLimits
from headrace.model.checkpoint import Checkpoint
from headrace.model.decoder import build_graph

BLOCK = 32
Answer = list[TokenLogprob]  # per output token: its id, its logprob and the likeliest others, to the bit


class EngineLoop:
    """Assembled as `engine.launch` does it, with small sizes. `answers` by (request id, choice); `events` of all kinds.

    `budget`: tokens a step; `blocks`: of each KV group.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, threads: int = 1, budget: int = 512, blocks: int = 160, seats: int = 48
    ) -> None:
        config = checkpoint.config
        graph = build_graph(config, checkpoint)
        spec = BackendSpec(
            kv_groups=graph.kv_groups,
            num_blocks=(blocks,) * len(graph.kv_groups),
            block_size=BLOCK,
            vocab_size=config.vocab_size,
            max_tokens=budget,
            max_rows=min(budget, 64),
            max_seqs=seats,
            max_model_len=config.max_position,
        )
        limits = StepLimits(seats, budget, spec.max_rows, config.max_position, config.vocab_size)
        self.backend = CpuBackend(graph, checkpoint, spec, threads=threads)
        self.kv = KVCacheManager(spec.kv_groups, spec.num_blocks, BLOCK)
        self.scheduler = Scheduler(limits, self.kv, EventRecorder("engine", 1))
        self.answers: dict[tuple[str, int], Answer] = {}
        self.events: list[Event] = []
        self.widest_step = 0  # sequences

    def add(
        self, name: str, prompt: Sequence[int], params: SamplingParams, choices: Sequence[int] = (0,)
    ) -> list[Request]:
        requests = [Request(name, list(prompt), params, 0, choice) for choice in choices]
        self.scheduler.add(requests, 0)
        return requests

    def step(self) -> bool:
        """One step, checked. False when there was nothing to compute."""
        batch = self.scheduler.schedule(0)
        if batch is None:
            self._take(self.scheduler.drain())
            return False
        self.backend.submit(batch)
        self._take(self.scheduler.update(batch, self.backend.collect(), 0))
        self.scheduler.check_integrity()
        self.widest_step = max(self.widest_step, batch.num_seqs)
        return True

    def finish(self) -> None:
        """Steps until all have ended; all blocks must be free then."""
        while self.step():
            pass
        assert not self.scheduler.has_requests
        assert self.kv.num_used_blocks == 0

    def answer(self, name: str, choice: int = 0) -> Answer:
        return self.answers[name, choice]

    def num_events(self, kind: EventKind, name: str) -> int:
        return sum(event.kind is kind and event.request_id == name for event in self.events)

    def _take(self, outputs: StepOutputs) -> None:
        self.events.extend(outputs.events)
        for output in outputs.outputs:
            assert output.finish_reason in (None, FinishReason.LENGTH), output
            if output.token_ids:
                assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
                assert [token.token_id for token in output.logprobs] == output.token_ids
                self.answers.setdefault((output.request_id, output.choice), []).extend(output.logprobs)
