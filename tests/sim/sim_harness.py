"""Deterministic simulation: the real Scheduler, KVCacheManager and fake backend, one seed, one thread, a fake clock.

A seed makes a `World` (pool, limits, KV groups, faults) and `Job`s (prompts, parameters, aborts). `Simulation` drives
them as an engine loop would, plays the client's ledger, and checks invariants after every step. `reference` says what
each choice must produce, from the oracle and the sampler alone.

Replay one seed: `python tests/sim/sim_harness.py SEED`.
"""

import dataclasses
import random
import sys
from dataclasses import dataclass, field

import numpy as np

from headrace.backend.base import BackendSpec
from headrace.backend.fake import FakeBackend, FakeBackendError, Faults, Prefix, hash_oracle
from headrace.backend.sampling import sample_batch
from headrace.backend.shadow import next_hash, root_hash
from headrace.base.clock import FakeClock
from headrace.core.batch import Batch
from headrace.core.batch_builder import ScheduledSequence, build_batch
from headrace.core.events import EventKind, EventRecorder
from headrace.core.kv_cache import KVCacheManager
from headrace.core.kv_group import KVGroup
from headrace.core.outputs import ChoiceOutput, StepOutputs, TokenLogprob
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.scheduler import Scheduler, StepLimits

VOCAB = 64
POISON = 63  # computing this token makes a sequence non-finite
USABLE = range(POISON)
ORACLE = hash_oracle(USABLE)


@dataclass(frozen=True)
class World:
    windows: tuple[int, ...] = (0,)  # one KV group each; 0: full
    num_blocks: tuple[int, ...] = (64,)
    block_size: int = 4
    max_num_seqs: int = 8
    budget: int = 32
    max_rows: int = 16
    max_model_len: int = 96
    prefix_caching: bool = True
    failing_steps: frozenset[int] = frozenset()  # counted over the whole run
    slow_every: int = 0

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        return tuple(KVGroup("window" if w else "full", (i,), 1, 8, w) for i, w in enumerate(self.windows))


@dataclass(frozen=True)
class Job:
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival_ns: int = 0
    n: int = 1
    salt: str = ""
    abort_at_ns: int | None = None
    abort_in_flight: bool = False  # between schedule and update, else between steps
    stop_string_after: int | None = None  # the client sends Finish once it has this many tokens of choice 0


@dataclass
class Answer:
    """What the client knows of one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None


def reference(job: Job, choice: int, max_model_len: int) -> Answer:
    """One choice, computed alone and whole, without scheduler, blocks or batches of more than one sequence."""
    answer = Answer()
    params, request = job.params, Request(job.request_id, list(job.prompt), job.params, 0, choice)
    if len(job.prompt) + (params.max_tokens > 0) > max_model_len:
        answer.reason = FinishReason.ERROR
        return answer
    owed = params.prompt_logprobs is not None and len(job.prompt) > 1
    if owed and POISON not in job.prompt[:-1]:
        answer.prompt_logprobs = _reference_rows(request, first_row=0, samples=False)[1]
    elif owed:
        answer.reason = FinishReason.ERROR
        return answer
    while answer.reason is None:
        tokens, stop = request.output_token_ids, params.stop_token_ids
        if tokens and tokens[-1] in stop:
            answer.reason = FinishReason.STOP
        elif len(tokens) >= params.max_tokens or (tokens and request.num_tokens >= max_model_len):
            answer.reason = FinishReason.LENGTH
        else:
            token, logprobs = _reference_rows(request, first_row=1 << 30, samples=True)
            if token is None:
                answer.reason = FinishReason.ERROR
                break
            tokens.append(token)
            answer.logprobs.extend(logprobs)
    answer.tokens = request.output_token_ids
    return answer


def _reference_rows(request: Request, first_row: int, samples: bool) -> tuple[int | None, list[TokenLogprob]]:
    from headrace.core.penalties import PenaltyHistory

    length = request.num_tokens
    tables = (np.arange(length, dtype=np.int32),)
    item = ScheduledSequence(request, 0, length, tables, first_row, samples, PenaltyHistory(request))
    batch = build_batch(0, [item], 1, [], VOCAB)
    hashes, prefix_hash, poisoned = [], root_hash(request.adapter_id), False
    for token in batch.input_ids.tolist():
        prefix_hash = next_hash(prefix_hash, token)
        hashes.append(prefix_hash)
        poisoned |= token == POISON
    logits = np.full((batch.num_rows, VOCAB), -12.0, np.float32)
    for row, index in enumerate(batch.output_rows.tolist()):
        candidates = ORACLE(Prefix(hashes[index], index, int(batch.input_ids[index])))
        for rank, token in reversed(list(enumerate(candidates))):
            logits[row, token] = 8.0 - 0.75 * rank
    if poisoned and samples:
        return None, []
    sampled = sample_batch(logits, batch)
    if sampled.status.any():
        return None, []
    about = sampled.token_ids if samples else batch.target_ids
    out = []
    for row, token in enumerate(about.tolist()):
        k = int(batch.sampling.num_logprobs[row])
        if k >= 0:
            top = list(zip(sampled.top_ids[row, :k].tolist(), sampled.logprobs[row, 1 : 1 + k].tolist(), strict=True))
            out.append(TokenLogprob(token, float(sampled.logprobs[row, 0]), top))
    return (int(about[0]) if samples else None), out


class Simulation:
    """One run of a world. `answers` is the client's ledger; `seen` counts what happened, to prove coverage."""

    def __init__(self, world: World, jobs: list[Job]) -> None:
        self.world = world
        self.jobs = {job.request_id: job for job in jobs}
        self.clock = FakeClock()
        self.answers = {(job.request_id, c): Answer() for job in jobs for c in range(job.n)}
        self.seen: dict[str, int] = dict.fromkeys((*map(str, EventKind), "copies", "crashes", "steps", "aborts"), 0)
        self._arrivals = sorted(jobs, key=lambda job: job.arrival_ns, reverse=True)
        self._pending_aborts = [job for job in jobs if job.abort_at_ns is not None]
        self._num_steps = 0
        self._epoch = -1
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
        except FakeBackendError:
            self._crash()
            return
        self._receive(self.scheduler.update(batch, result, self.clock.now_ns()))
        self.scheduler.check_integrity()

    def _drain_inbox(self) -> None:
        now = self.clock.now_ns()
        while self._arrivals and self._arrivals[-1].arrival_ns <= now:
            self._add(self._arrivals.pop(), now)
        self._abort(in_flight=False)

    def _add(self, job: Job, now: int) -> None:
        """Adds or resubmits what is not finished of a job. Without any output its prompt logprobs come anew."""
        choices = []
        fresh = not any(self.answers[job.request_id, choice].tokens for choice in range(job.n))
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
    if answer.reason is FinishReason.ABORT:
        return
    if job.stop_string_after is not None and choice == 0 and answer.reason is FinishReason.STOP:
        assert len(answer.tokens) in (job.stop_string_after, len(expected.tokens)), name
        return
    assert answer.tokens == expected.tokens, f"{name} has other tokens"
    assert answer.reason == expected.reason, f"{name} ended with {answer.reason}, not {expected.reason}"
    if answer.reason is not FinishReason.ERROR:
        assert answer.prompt_logprobs == expected.prompt_logprobs, f"{name} has other prompt logprobs"
    assert answer.logprobs == expected.logprobs, f"{name} has other logprobs"


def random_world(rng: random.Random) -> World:
    block_size = rng.choice((1, 2, 4, 8))
    windows = rng.choice(((0,), (0,), (0, 6), (0, 9, 17), (7,), (12, 3)))
    longest = rng.choice((24, 60, 96))
    enough = -(-longest // block_size)
    roomy = rng.choice((0, 2, 2, 30))  # tiny pools force preemption
    world = World(
        windows=windows,
        num_blocks=tuple(
            (min(enough, -(-w // block_size) + 1) if w and rng.random() < 0.5 else enough) + rng.randint(0, roomy)
            for w in windows
        ),
        block_size=block_size,
        max_num_seqs=rng.choice((1, 4, 8)),
        budget=rng.choice((1, 8, 16, 40)),
        max_rows=rng.choice((1, 6, 16, 16)),
        max_model_len=longest,
        prefix_caching=rng.random() < 0.75,
        failing_steps=frozenset(rng.sample(range(60), rng.choice((0, 0, 1, 3)))),
        slow_every=rng.choice((0, 5)),
    )
    return dataclasses.replace(world, max_num_seqs=min(world.max_num_seqs, world.max_rows, world.budget))


def random_params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.choice((0, 1, 2, 8, 20, 40, 200))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, 0, 3)),
        temperature=rng.choice((0.0, 0.0, 0.7, 1.5)),
        top_k=rng.choice((0, 0, 3)),
        top_p=rng.choice((1.0, 1.0, 0.8)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        presence_penalty=rng.choice((0.0, 0.0, 0.5)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.4)),
        logit_bias=rng.choice(((), (), ((5, 4.0), (9, -50.0)))),
        seed=rng.getrandbits(64),
        stop_token_ids=rng.choice(((), tuple(rng.sample(USABLE, 4)))),
        logprobs=rng.choice((None, None, 0, 3)),
        prompt_logprobs=rng.choice((None, None, None, 0, 2)),
    )


def random_jobs(rng: random.Random, longest: int, disturbed: bool = True) -> list[Job]:
    """`disturbed`: with aborts, client stops and poisoned prompts."""
    prefixes = [[rng.choice(USABLE) for _ in range(rng.randint(1, longest // 2))] for _ in range(3)]
    jobs = []
    for index in range(rng.randint(1, 12)):
        prompt = (rng.choice(prefixes) if rng.random() < 0.7 else []) + [
            rng.choice(USABLE) for _ in range(rng.randint(1, longest // 3))
        ]
        if disturbed and rng.random() < 0.1:
            prompt[rng.randrange(len(prompt))] = POISON
        arrival_ns = rng.choice((0, rng.randint(0, 20_000_000)))
        job = Job(
            request_id=f"r{index}",
            prompt=tuple(prompt),
            params=random_params(rng),
            arrival_ns=arrival_ns,
            n=rng.choice((1, 1, 2, 4)),
            salt=rng.choice(("", "", "tenant")),
            abort_at_ns=arrival_ns + rng.randint(0, 10_000_000) if disturbed and rng.random() < 0.25 else None,
            abort_in_flight=rng.random() < 0.5,
            stop_string_after=rng.randint(1, 6) if disturbed and rng.random() < 0.2 else None,
        )
        jobs.append(job)
        if rng.random() < 0.5 and len(prompt) < longest // 2:  # the next turn of this conversation comes later
            prefixes.append(prompt + reference(job, 0, longest).tokens)
    return jobs


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
