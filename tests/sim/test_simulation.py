"""Random worlds: every request gets exactly its reference answer or was aborted, and nothing is held at the end."""

import dataclasses
import random
from collections import Counter

import pytest
from sim_harness import Simulation, simulate
from sim_worlds import Job, World, random_jobs, random_world

from headrace.core.request import SamplingParams

NUM_SEEDS = 64


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 8))
def test_random_worlds(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 8):
        seen.update(simulate(seed).seen)
    assert seen["finished"] > 20


def test_the_worlds_reach_the_rare_branches() -> None:
    """A simulation that never preempts, copies or crashes would prove nothing about these."""
    seen: Counter[str] = Counter()
    for seed in range(1000, 1008):
        rng = random.Random(seed)
        world = World(num_blocks=(12,), block_size=4, max_num_seqs=8, budget=24, max_model_len=48)
        world = dataclasses.replace(world, failing_steps=frozenset({12, 25}))
        seen.update(Simulation(world, random_jobs(rng, world.max_model_len)).run().seen)
    for branch in ("preempted", "resumed", "copies", "crashes", "failed_steps", "prefix_hit", "aborts"):
        assert seen[branch] > 0, f"no run reached: {branch}"


@pytest.mark.parametrize("seed", range(200, 208))
def test_the_same_work_gives_the_same_answers_in_any_world(seed: int) -> None:
    """Metamorphic: block size, budget, seats, groups and cache must not show in any token or logprob."""
    rng = random.Random(seed)
    jobs = random_jobs(rng, 48, disturbed=False)
    answers = []
    for _ in range(3):
        world = random_world(rng)
        enough = -(-48 // world.block_size)
        blocks = tuple(enough + rng.randint(0, 4) for _ in world.windows)
        world = dataclasses.replace(world, num_blocks=blocks, max_model_len=48, failing_steps=frozenset())
        answers.append(Simulation(world, jobs).run().answers)
    assert answers[0] == answers[1] == answers[2]


def test_a_tiny_pool_under_pressure_ends_and_starves_nobody() -> None:
    """Twelve requests, each as long as the whole pool: they can only run one after the other."""
    world = World(num_blocks=(12,), block_size=4, max_num_seqs=8, budget=16, max_model_len=48)
    params = SamplingParams(max_tokens=28, temperature=0.0)
    jobs = [Job(f"r{i}", tuple(range(i, i + 20)), params, arrival_ns=i) for i in range(12)]
    simulation = Simulation(world, jobs).run()
    assert simulation.seen["preempted"] > 0
    assert all(len(answer.tokens) == 28 for answer in simulation.answers.values())


def test_a_run_repeats_itself() -> None:
    assert simulate(3).answers == simulate(3).answers
