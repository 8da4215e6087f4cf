"""A step costs the same however many requests wait. Operations are counted, not time.

Two counts: lines of our code that run, and comparisons of places in the queue, which happen inside heapq and bisect.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from scheduler_loop import BLOCK, Engine

import headrace
from headrace.core import scheduler as scheduler_module
from headrace.core.request import FinishReason, Request, SamplingParams

HOME = str(Path(headrace.__file__).parent)
QUEUES = (10, 1_000, 100_000)
SEATS = 8


class Comparisons:
    """Counts comparisons of the places that it makes."""

    def __init__(self) -> None:
        self.count = 0
        counter = self

        class Place(tuple[int, ...]):
            def __lt__(self, other: Any) -> bool:
                counter.count += 1
                return super().__lt__(other)

            def __eq__(self, other: object) -> bool:
                counter.count += 1
                return super().__eq__(other)

            __hash__ = tuple.__hash__

        self.make = lambda request, ticket: Place((request.arrival_ns, ticket, request.choice))


def lines_of(work: Callable[[], object]) -> int:
    """How many lines of headrace ran."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


class World:
    """SEATS requests that decode and `waiting` behind them."""

    def __init__(self, waiting: int) -> None:
        self.engine = Engine(num_blocks=SEATS * 64, seats=SEATS, context=64 * BLOCK, budget=64)
        self.waiting = waiting
        prompt, params = list(range(6)), SamplingParams(max_tokens=200)
        for index in range(SEATS + waiting):
            self.engine.scheduler.add([Request(f"r{index:06}", prompt, params, index)], 0)
        self.engine.receive(self.engine.scheduler.drain())
        for _ in range(4):
            self.step()
        assert len(self.scheduler.running) == SEATS
        assert len(self.scheduler.waiting) == waiting

    @property
    def scheduler(self) -> scheduler_module.Scheduler:
        return self.engine.scheduler

    def step(self) -> None:
        """Without the linear checks of `Engine.step`."""
        batch = self.scheduler.schedule(0)
        assert batch is not None
        self.engine.receive(self.scheduler.update(batch, self.engine.answer(batch), 0))
        self.scheduler.gauges()


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> Comparisons:
    counter = Comparisons()
    monkeypatch.setattr(scheduler_module, "order", counter.make)
    return counter


def comings_and_goings(world: World) -> list[int]:
    """Lines run by each of: arrivals at both ends, aborts, a seat that becomes free twice and is taken."""
    scheduler, params = world.scheduler, SamplingParams(max_tokens=200)
    late, early = (Request(name, [1, 2, 3], params, at) for name, at in (("late", 1 << 40), ("early", -1)))
    works: list[Callable[[], object]] = [
        lambda: scheduler.add([late], 0),
        lambda: scheduler.add([early], 0),
        lambda: scheduler.abort(f"r{SEATS + world.waiting // 2:06}", 0),
        lambda: scheduler.abort(f"r{SEATS + world.waiting - 1:06}", 0),
        lambda: scheduler.abort("r000000", 0),
        world.step,
        lambda: scheduler.finish("r000001", 0, FinishReason.STOP, 1, 0),
        world.step,
    ]
    lines = [lines_of(work) for work in works]
    assert scheduler.running[0].request is early
    return lines


def test_a_step_never_looks_at_who_waits_and_a_change_costs_a_logarithm_at_most(comparisons: Comparisons) -> None:
    steps, changes = [], []
    for waiting in QUEUES:
        world = World(waiting)
        comparisons.count = 0
        steps.append([lines_of(world.step) for _ in range(2 * BLOCK)])  # over a block's border
        assert comparisons.count == 0
        changes.append(comings_and_goings(world))
        assert comparisons.count <= 60 + 8 * math.log2(waiting)
    assert steps[0] == steps[1] == steps[2]
    assert changes[0] == changes[1] == changes[2]
    assert min(steps[0]) > 100, "nothing was counted"


def test_many_aborts_in_a_row_cost_a_logarithm_each(comparisons: Comparisons) -> None:
    """Marked entries leave the heap all at once, when they are the majority."""
    waiting = 2_000
    world = World(waiting)
    comparisons.count = 0
    work = lines_of(lambda: [world.scheduler.abort(f"r{SEATS + index:06}", 0) for index in range(waiting)])
    assert not world.scheduler.waiting
    assert comparisons.count <= 4 * waiting * math.log2(waiting)
    assert work <= 60 * waiting
