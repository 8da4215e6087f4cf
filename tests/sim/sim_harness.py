"""Deterministic simulation: the real Scheduler, KVCacheManager and fake backend, one seed, one thread, a fake clock.

`Simulation` drives the jobs of a world as an engine loop would, plays the client's ledger, and checks invariants after
every step. Replay one seed from the repository's root: `PYTHONPATH=. python tests/sim/sim_harness.py SEED`.
"""

import random
import sys
from dataclasses import replace

import numpy as np
from sim_worlds import ORACLE, POISON, VOCAB, Answer, Job, World, random_jobs, random_world, reference

from headrace.backend.base import BackendSpec
from headrace.backend.fake import FakeBackend, FakeBackendError, Faults
from headrace.base.clock import FakeClock
from headrace.core.batch import Batch
from headrace.core.batch_builder import build_batch
from headrace.core.events import EventKind, EventRecorder
from headrace.core.kv_cache import KVCacheManager
from headrace.core.outputs import ChoiceOutput, StepOutputs
from headrace.core.request import FinishReason, Request
from headrace.core.scheduler import Scheduler, StepLimits


class Simulation:
    """One run of a world. `answers` is the client's ledger; `seen` counts what happened, to prove coverage."""

    def __init__(self, world: World, jobs: list[Job]) -> None:
        self.world = world
        self.jobs = {job.request_id: job for job in jobs}
        self.clock = FakeClock()
        self.answers = {(job.request_id, c): Answer() for job in jobs for c in range(job.n)}
        self.seen: dict[str, int] = dict.fromkeys(
            (*map(str, EventKind), "copies", "crashes", "failed_steps", "steps", "aborts"), 0
        )
        self._arrivals = sorted(jobs, key=lambda job: job.arrival_ns, reverse=True)
        self._pending_aborts = [job for job in jobs if job.abort_at_ns is not None]
        self._num_steps = 0
        self._epoch = -1
        self._last_batches: list[tuple[Batch, bytes]] = []
        self._start()

    def _start(self) -> None:
        world = self.world
        self._epoch += 1
        self._next_sequence = 0
        failing = frozenset(s - self._num_steps for s in world.failing_steps if s >= self._num_steps)
        spec = BackendSpec(
            kv_groups=world.groups,
            num_blocks=world.num_blocks,
            block_size=world.block_size,
            vocab_size=VOCAB,
            max_tokens=world.budget,
            max_rows=world.max_rows,
            max_seqs=world.max_num_seqs,
            max_model_len=world.max_model_len,
        )
        faults = Faults(raise_at_steps=failing, slow_every=world.slow_every, non_finite_token=POISON)
        self.backend = FakeBackend(spec, ORACLE, self.clock, self.clock.advance_ns, faults)
        self.kv = KVCacheManager(world.groups, world.num_blocks, world.block_size, world.prefix_caching)
        limits = StepLimits(world.max_num_seqs, world.budget, world.max_rows, world.max_model_len, VOCAB)
        self.scheduler = Scheduler(limits, self.kv, EventRecorder("engine", self._epoch))

    def run(self) -> "Simulation":
        bound = 200 + 20 * sum(job.n * (len(job.prompt) + job.params.max_tokens) for job in self.jobs.values())
        while self._arrivals or self.scheduler.has_requests:
            self._drain_inbox()
            self.step()
            assert self.seen["steps"] < bound, "no progress: the simulation does not end"
        self._check_end()
        return self

    def step(self) -> None:
        batch = self.scheduler.schedule(self.clock.now_ns())
        if batch is None:
            self._receive(self.scheduler.drain())
            assert not self.scheduler.has_requests, "requests are here and nothing is scheduled"
            if self._arrivals:
                self.clock.advance_ns(max(0, self._arrivals[-1].arrival_ns - self.clock.now_ns()))
            return
        self._num_steps += 1
        self.seen["steps"] += 1
        self._check_batch(batch)
        self.backend.submit(batch)
        self._abort(in_flight=True)
        try:
            result = self.backend.collect()
        except FakeBackendError as error:
            if self._num_steps % 2:
                self._crash()
            else:
                self._receive(self.scheduler.fail_step(str(error), self.clock.now_ns()))
                self.scheduler.check_integrity()
                self.seen["failed_steps"] += 1
            return
        self._receive(self.scheduler.update(batch, result, self.clock.now_ns()))
        self.scheduler.check_integrity()

    def _drain_inbox(self) -> None:
        now = self.clock.now_ns()
        while self._arrivals and self._arrivals[-1].arrival_ns <= now:
            self._add(self._arrivals.pop(), now)
        self._abort(in_flight=False)

    def _add(self, job: Job, now: int) -> None:
        """Adds or resubmits what is not finished of a job. Where none of that has output, prompt logprobs come anew."""
        choices = []
        live = [answer for c in range(job.n) if (answer := self.answers[job.request_id, c]).reason is None]
        fresh = not any(answer.tokens for answer in live)
        for choice in range(job.n):
            answer = self.answers[job.request_id, choice]
            if answer.reason is None:
                tokens = list(answer.tokens)
                choices.append(
                    Request(job.request_id, list(job.prompt), job.params, job.arrival_ns, choice, tokens, job.salt)
                )
                if fresh:
                    answer.prompt_logprobs.clear()
        if choices:
            self.scheduler.add(choices, now)

    def _abort(self, in_flight: bool) -> None:
        now = self.clock.now_ns()
        for job in [job for job in self._pending_aborts if job.abort_in_flight == in_flight]:
            if job.abort_at_ns is not None and job.abort_at_ns <= now and job not in self._arrivals:
                self._pending_aborts.remove(job)
                self.seen["aborts"] += self.scheduler.abort(job.request_id, now)
                for choice in range(job.n):
                    answer = self.answers[job.request_id, choice]
                    answer.reason = answer.reason or FinishReason.ABORT

    def _crash(self) -> None:
        """The engine dies with its step; the client starts another and resubmits prompt and output."""
        self.seen["crashes"] += 1
        live = dict.fromkeys(request_id for (request_id, _), answer in self.answers.items() if answer.reason is None)
        waiting = {job.request_id for job in self._arrivals}
        self._start()
        for request_id in live:
            if request_id not in waiting:
                self._add(self.jobs[request_id], self.clock.now_ns())

    def _receive(self, outputs: StepOutputs) -> None:
        for event in outputs.events:
            assert (event.epoch, event.sequence) == (self._epoch, self._next_sequence), "an event is missing"
            self._next_sequence += 1
            self.seen[event.kind] += event.num_tokens if event.kind == EventKind.PREFIX_HIT else 1
        for output in outputs.outputs:
            self._take(output)

    def _take(self, output: ChoiceOutput) -> None:
        answer = self.answers[output.request_id, output.choice]
        if answer.reason is FinishReason.ABORT:
            return  # it was on its way when the client gave up
        assert answer.reason is None, f"{output} comes after the end"
        answer.tokens.extend(output.token_ids)
        answer.logprobs.extend(output.logprobs or ())
        answer.prompt_logprobs.extend(output.prompt_logprobs or ())
        answer.reason = output.finish_reason
        answer.failed_step = "injected" in (output.error or "")
        assert (output.error is not None) == (output.finish_reason is FinishReason.ERROR)
        after = self.jobs[output.request_id].stop_string_after
        if after is not None and output.choice == 0 and len(answer.tokens) >= after and answer.reason is None:
            answer.reason = FinishReason.STOP
            del answer.tokens[after:]
            now = self.clock.now_ns()
            assert self.scheduler.finish(output.request_id, 0, FinishReason.STOP, after, now)

    def _check_batch(self, batch: Batch) -> None:
        world, scheduler = self.world, self.scheduler
        assert batch.num_tokens <= world.budget
        assert batch.num_rows <= world.max_rows
        assert batch.num_seqs <= world.max_num_seqs
        assert batch.num_seqs == len(scheduler.running), "a running sequence gets no token in this step"
        for pool in self.kv.pools:
            held = sum(count > 0 for count in pool.ref_cnt)
            assert held + pool.num_free == pool.num_blocks
        self.seen["copies"] += len(batch.block_copies)
        self._check_alone(batch)

    def _check_alone(self, batch: Batch) -> None:
        """What the builder takes over from step to step makes no difference, but for columns of padding."""
        plan = self.scheduler._step
        assert plan is not None
        alone = build_batch(batch.step_id, plan.scheduled, self.world.block_size, plan.copies, VOCAB)
        tables = [
            array[:, : other.shape[1]] for array, other in zip(batch.block_tables, alone.block_tables, strict=True)
        ]
        trimmed = replace(batch, block_tables=tuple(np.ascontiguousarray(table) for table in tables))
        assert trimmed.to_buffer() == alone.to_buffer(), f"step {batch.step_id} differs from one built alone"
        assert all(
            (array[:, table.shape[1] :] == -1).all() for array, table in zip(batch.block_tables, tables, strict=True)
        )
        self._last_batches = [*self._last_batches[-2:], (batch, batch.to_buffer())]
        for earlier, buffer in self._last_batches:
            assert earlier.to_buffer() == buffer, f"step {earlier.step_id} changed after it was handed out"

    def _check_end(self) -> None:
        self.scheduler.check_integrity()
        gauges = self.scheduler.gauges()
        assert (gauges.num_running, gauges.num_waiting, gauges.kv_blocks_used) == (0, 0, 0)
        for (request_id, choice), answer in self.answers.items():
            check_answer(self.jobs[request_id], choice, answer, self.scheduler.max_model_len)


def check_answer(job: Job, choice: int, answer: Answer, max_model_len: int) -> None:
    """The answer is the reference, or a beginning of it where the job was cut short."""
    name = f"{job.request_id}/{choice}"
    expected = reference(job, choice, max_model_len)
    assert answer.reason is not None, f"{name} never ended"
    assert answer.tokens == expected.tokens[: len(answer.tokens)], f"{name} has other tokens"
    if answer.reason is FinishReason.ABORT or answer.failed_step:
        return
    if job.stop_string_after is not None and choice == 0 and answer.reason is FinishReason.STOP:
        assert len(answer.tokens) in (job.stop_string_after, len(expected.tokens)), name
        return
    assert answer.tokens == expected.tokens, f"{name} has other tokens"
    assert answer.reason == expected.reason, f"{name} ended with {answer.reason}, not {expected.reason}"
    if answer.reason is not FinishReason.ERROR:
        assert answer.prompt_logprobs == expected.prompt_logprobs, f"{name} has other prompt logprobs"
    assert answer.logprobs == expected.logprobs, f"{name} has other logprobs"


def simulate(seed: int) -> Simulation:
    """One seed. A failure names the seed and the world."""
    rng = random.Random(seed)
    world = random_world(rng)
    jobs = random_jobs(rng, world.max_model_len)
    try:
        return Simulation(world, jobs).run()
    except Exception as error:
        raise AssertionError(f"seed {seed}, {world}: {error}") from error


if __name__ == "__main__":
    print(simulate(int(sys.argv[1])).seen)
