"""What a simulation runs: worlds (pools, limits, KV groups, faults), jobs, and what each job must answer.

`reference` computes one choice alone and whole from the oracle and the sampler, without scheduler or blocks.
"""

import dataclasses
import functools
import random
from dataclasses import dataclass, field

import numpy as np

from headrace.backend.fake import Prefix, hash_oracle
from headrace.backend.sampling import sample_batch
from headrace.backend.shadow import next_hash, root_hash
from headrace.core.batch_builder import ScheduledSequence, build_batch
from headrace.core.kv_group import KVGroup
from headrace.core.outputs import TokenLogprob
from headrace.core.penalties import PenaltyHistory
from headrace.core.request import FinishReason, Request, SamplingParams

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
    failed_step: bool = False  # its step failed, and it with it


@functools.lru_cache(maxsize=4096)
def reference(job: Job, choice: int, max_model_len: int) -> Answer:
    """One choice, computed alone and whole. Its result is shared: do not change it."""
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
