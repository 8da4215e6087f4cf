"""Proof that the checks fire: break one thing on purpose, and the run must fail."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from sim_harness import Simulation, check_answer
from sim_worlds import Job, World

from headrace.backend.shadow import ShadowError
from headrace.base.errors import HeadraceError
from headrace.core.batch import Batch, BatchError
from headrace.core.block_pool import BlockPoolError
from headrace.core.request import Request, SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
PROMPT = tuple(range(3, 17))


def simulation(n: int = 1, num_jobs: int = 2, **changes: object) -> Simulation:
    world = dataclasses.replace(World(), **changes)
    return Simulation(world, [Job(f"r{i}", (*PROMPT, i), PARAMS, n=n) for i in range(num_jobs)])


def tamper(sim: Simulation, change: Callable[[Batch], Batch]) -> None:
    """Every batch goes through `change` on its way to the backend."""
    submit = sim.backend.submit
    sim.backend.submit = lambda batch: submit(change(batch))  # type: ignore[method-assign]


def test_the_untouched_run_passes() -> None:
    simulation(n=3).run()


def test_a_foreign_block_table_is_noticed() -> None:
    """Decoding sequences read each other's prefix."""

    def swap(batch: Batch) -> Batch:
        if batch.num_seqs < 2 or batch.num_tokens > batch.num_seqs:
            return batch
        tables = (batch.block_tables[0][::-1].copy(),)
        slots = tables[0][np.arange(batch.num_seqs), batch.positions[0] // 4] * 4 + batch.positions[0] % 4
        return dataclasses.replace(batch, block_tables=tables, slot_mapping=(slots.astype(np.int32),))

    sim = simulation()
    tamper(sim, swap)
    with pytest.raises(AssertionError, match="other tokens"):
        sim.run()


def test_a_stale_slot_is_noticed() -> None:
    sim = simulation()
    for _ in range(3):
        sim._drain_inbox()
        sim.step()
    table = sim.kv.block_tables(sim.scheduler.running[0].request)[0]
    sim.backend.stores[0].position[table[1] * 4 + 2] = 99
    with pytest.raises(ShadowError, match="holds position 99"):
        sim.run()


def test_a_missing_copy_is_noticed() -> None:
    """n = 3 choices share a partial block; the writer must get its own first."""
    sim = simulation(n=3, num_jobs=1)
    tamper(sim, lambda batch: dataclasses.replace(batch, block_copies=np.empty((0, 3), np.int32)))
    with pytest.raises(ShadowError):
        sim.run()


def test_writing_into_a_shared_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without copy-on-write the choices of one request overwrite each other."""
    sim = simulation(n=3, num_jobs=1)
    monkeypatch.setattr(type(sim.kv), "_is_shared", lambda *_: False)
    with pytest.raises(HeadraceError):
        sim.run()


def test_a_block_freed_too_early_is_noticed() -> None:
    sim = simulation()
    for _ in range(3):
        sim._drain_inbox()
        sim.step()
    block = int(sim.kv.block_tables(sim.scheduler.running[0].request)[0][0])
    sim.kv.pools[0].release(block)
    with pytest.raises(BlockPoolError):
        sim.scheduler.check_integrity()


def test_a_wrong_prefix_hit_is_noticed() -> None:
    """The index names a block by a prefix that it does not hold."""
    sim = simulation(num_jobs=1)
    sim.run()
    pool = sim.kv.pools[0]
    names = list(pool._index)
    pool._index[names[0]], pool._index[names[1]] = pool._index[names[1]], pool._index[names[0]]
    sim.scheduler.add([sim_request("again")], 0)
    with pytest.raises(ShadowError):
        while sim.scheduler.has_work:
            sim.answers["again", 0] = sim.answers["r0", 0]
            sim.step()


def test_a_wrong_slot_is_noticed() -> None:
    sim = simulation()
    tamper(sim, lambda batch: dataclasses.replace(batch, slot_mapping=(batch.slot_mapping[0] + 1,)))
    with pytest.raises(BatchError, match="slot_mapping"):
        sim.run()


def test_a_window_that_is_too_short_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The windowed group lets go one block too early."""
    sim = simulation(windows=(0, 6), num_blocks=(64, 64))
    first_visible = type(sim.kv)._first_visible
    monkeypatch.setattr(type(sim.kv), "_first_visible", lambda self, group, p: first_visible(self, group, p + 4))
    with pytest.raises(ShadowError, match="has no KV block"):
        sim.run()


def test_a_repeated_token_is_noticed() -> None:
    sim = simulation(num_jobs=1)
    sim.run()
    answer = sim.answers["r0", 0]
    answer.tokens.insert(3, answer.tokens[2])
    with pytest.raises(AssertionError, match="other tokens"):
        check_answer(sim.jobs["r0"], 0, answer, 96)


def sim_request(request_id: str) -> Request:
    return Request(request_id, [*PROMPT, 0], PARAMS, 0)
