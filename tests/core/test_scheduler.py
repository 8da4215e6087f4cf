"""Scheduler: steps, memory, stops, logprobs, events and cost; one behaviour a test."""

import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest
from scheduler_loop import Engine, hash_token

from headrace.core.events import EventKind
from headrace.core.request import FinishReason, RequestStatus
from headrace.core.scheduler import SchedulerError

# Steps


def test_a_request_gives_its_tokens_and_stops_at_max_tokens() -> None:
    engine = Engine()
    engine.add("a", 6, max_tokens=3)
    engine.run()
    assert engine.tokens("a") == [106, 107, 108]
    assert engine.reason("a") is FinishReason.LENGTH


def test_a_long_prompt_goes_in_chunks_beside_decoding_sequences() -> None:
    engine = Engine(budget=8)
    engine.add("a", 4, max_tokens=20)
    engine.step()
    engine.add("b", 20, max_tokens=2)
    counts = []
    while not engine.tokens("b"):
        batch = engine.step()
        assert batch is not None
        counts.append(np.diff(batch.cu_seqlens_q).tolist())
    assert counts == [[1, 7], [1, 7], [1, 6]]
    assert engine.tokens("a") == [104, 105, 106, 107]


def test_a_running_prompt_never_starves_sequences_behind_it() -> None:
    """The earlier request has a huge prompt; the later one was admitted in the same step and goes on every step."""
    engine = Engine(budget=8, seats=4)
    engine.add("b", 2, arrival=5, max_tokens=50)
    engine.step()
    engine.add("a", 60, arrival=0, max_tokens=1)
    for _ in range(6):
        batch = engine.step()
        assert batch is not None and batch.num_seqs == 2
    assert len(engine.tokens("b")) == 7


def test_seats_are_bounded_by_the_budget_and_by_rows() -> None:
    assert Engine(seats=9, budget=3).scheduler.max_num_seqs == 3
    assert Engine(seats=9, rows=5).scheduler.max_num_seqs == 5


def test_first_come_first_served_by_arrival_time() -> None:
    engine = Engine(seats=1)
    engine.add("late", arrival=9, max_tokens=1)
    engine.add("early", arrival=1, max_tokens=1)
    engine.run()
    assert [event.request_id for event in engine.of(EventKind.FIRST_TOKEN)] == ["early", "late"]


def test_schedule_and_update_must_alternate() -> None:
    engine = Engine()
    engine.add("a")
    batch = engine.scheduler.schedule(0)
    assert batch is not None
    with pytest.raises(SchedulerError, match="a step is out"):
        engine.scheduler.schedule(0)
    result = engine.answer(batch)
    engine.scheduler.update(batch, result, 0)
    with pytest.raises(SchedulerError, match="does not belong"):
        engine.scheduler.update(batch, result, 0)


def test_nothing_to_do_is_none() -> None:
    engine = Engine()
    assert engine.step() is None
    assert not engine.scheduler.has_work


# Memory


def test_the_latest_running_request_is_preempted_keeps_its_place_and_repeats_no_token() -> None:
    engine = Engine(num_blocks=8, context=32)
    engine.add("a", 8, arrival=0, max_tokens=20)
    engine.add("b", 8, arrival=1, max_tokens=20)
    engine.add("c", 3, arrival=2, max_tokens=2)
    engine.run()
    preempted = [event.request_id for event in engine.of(EventKind.PREEMPTED)]
    assert preempted and set(preempted) <= {"b", "c"}
    assert engine.tokens("a") == engine.tokens("b") == list(range(108, 128))
    assert engine.tokens("c") == [103, 104]
    resumed = [event.request_id for event in engine.of(EventKind.RESUMED)]
    assert sorted(resumed) == sorted(preempted)


def test_a_preempted_request_goes_before_one_that_never_ran() -> None:
    engine = Engine(num_blocks=8, context=32, seats=2)
    engine.add("a", 8, arrival=0, max_tokens=20)
    engine.add("b", 8, arrival=1, max_tokens=20)
    engine.add("c", 8, arrival=2, max_tokens=20)
    engine.run()
    finished = [event.request_id for event in engine.of(EventKind.FINISHED)]
    assert finished == ["a", "b", "c"]


def test_a_preempted_request_takes_its_own_blocks_back_from_the_prefix_cache() -> None:
    engine = Engine(num_blocks=12, context=40)
    engine.add("a", 8, arrival=0, max_tokens=24)
    engine.add("b", 8, arrival=1, max_tokens=24)
    engine.run()
    assert engine.of(EventKind.RESUMED)
    hits = [event for event in engine.of(EventKind.PREFIX_HIT) if event.num_tokens]
    assert {event.request_id for event in hits} == {"b"}


def test_a_waiting_request_is_admitted_only_when_its_whole_prompt_has_blocks() -> None:
    engine = Engine(num_blocks=10, context=40)
    engine.add("a", 16, arrival=0, max_tokens=6)
    engine.add("b", 24, arrival=1, max_tokens=2)
    engine.run()
    assert not engine.of(EventKind.PREEMPTED)
    assert [event.request_id for event in engine.of(EventKind.FINISHED)] == ["a", "b"]


@pytest.mark.parametrize("prompt", [32, 33, 100])
def test_a_prompt_that_can_never_fit_fails_alone_with_both_numbers(prompt: int) -> None:
    engine = Engine(num_blocks=8)  # 32 tokens
    engine.add("huge", prompt)
    engine.add("small", 4, max_tokens=2)
    engine.run()
    assert engine.reason("huge") is FinishReason.ERROR
    error = next(o.error for o in engine.outputs if o.request_id == "huge")
    assert error is not None and f"{prompt} tokens" in error and "32" in error
    assert engine.tokens("small") == [104, 105]


def test_an_empty_prompt_fails() -> None:
    engine = Engine()
    engine.add("a", [])
    engine.run()
    assert engine.reason("a") is FinishReason.ERROR


def test_output_ends_where_the_pool_or_the_context_ends() -> None:
    engine = Engine(num_blocks=8)
    engine.add("a", 30, max_tokens=100)
    engine.run()
    assert engine.tokens("a") == [130, 131]
    assert engine.reason("a") is FinishReason.LENGTH
    assert Engine(num_blocks=64, context=50).scheduler.max_model_len == 50


# Stops


def test_a_stop_token_ends_and_is_returned() -> None:
    engine = Engine()
    engine.add("a", 6, max_tokens=10, stop_token_ids=(107,))
    engine.run()
    assert engine.tokens("a") == [106, 107]
    assert engine.reason("a") is FinishReason.STOP


def test_below_min_tokens_the_stop_ids_are_forbidden() -> None:
    engine = Engine()
    engine.add("a", 6, max_tokens=10, min_tokens=2, stop_token_ids=(900, 901))
    seen = []
    while (batch := engine.step()) is not None:
        rows = batch.sampling
        seen.append(dict(zip(rows.bias_ids.tolist(), rows.bias_values.tolist(), strict=True)))
    assert seen[:2] == [{900: -np.inf, 901: -np.inf}] * 2
    assert seen[2:] == [{}] * 8


def test_max_tokens_zero_computes_nothing_unless_prompt_logprobs_are_asked() -> None:
    engine = Engine()
    engine.add("a", 6, max_tokens=0)
    engine.add("b", 6, max_tokens=0, prompt_logprobs=0, n=2)
    batch = engine.step()
    assert batch is not None
    assert batch.num_tokens == 5  # the last prompt token predicts nothing that is asked
    engine.run()
    assert engine.reason("a") is FinishReason.LENGTH
    for choice in (0, 1):
        assert engine.reason("b", choice) is FinishReason.LENGTH
        mine = [o for o in engine.outputs if (o.request_id, o.choice) == ("b", choice)]
        assert [entry.token_id for o in mine for entry in o.prompt_logprobs or ()] == [
            hash_token("b", i) for i in range(1, 6)
        ]
    assert engine.tokens("a") == engine.tokens("b") == []


# Logprobs


def test_logprobs_stand_beside_their_tokens() -> None:
    engine = Engine()
    engine.add("a", 4, max_tokens=2, logprobs=2)
    engine.add("b", 4, max_tokens=2)
    engine.run()
    entries = [entry for o in engine.outputs if o.request_id == "a" for entry in o.logprobs or ()]
    assert [(entry.token_id, entry.logprob, entry.top) for entry in entries] == [
        (104, 0.0, [(0, -1.0), (1, -2.0)]),
        (105, 0.0, [(0, -1.0), (1, -2.0)]),
    ]
    assert all(o.logprobs is None for o in engine.outputs if o.request_id == "b")


@pytest.mark.parametrize("budget", [3, 5, 64])
@pytest.mark.parametrize("rows", [2, 64])
def test_prompt_logprobs_come_once_in_order_and_do_not_use_the_prefix_cache(budget: int, rows: int) -> None:
    engine = Engine(budget=budget, rows=rows)
    engine.add("warm", list(range(20)), max_tokens=1)
    engine.run()
    engine.add("a", list(range(20)), max_tokens=2, prompt_logprobs=1, n=2)
    engine.run()
    for choice in (0, 1):
        mine = [o for o in engine.outputs if (o.request_id, o.choice) == ("a", choice)]
        assert [entry.token_id for o in mine for entry in o.prompt_logprobs or ()] == list(range(1, 20))
        reported = next(i for i, o in enumerate(mine) if o.token_ids)
        assert all(o.prompt_logprobs is None for o in mine[reported + 1 :])
    assert next(o.num_cached_tokens for o in engine.outputs if o.request_id == "a" and o.choice == 0) == 0


def test_many_prompt_logprob_rows_leave_rows_for_those_behind() -> None:
    engine = Engine(rows=4, seats=4)
    engine.add("b", 2, arrival=5, max_tokens=30)
    engine.step()
    engine.add("a", 40, arrival=0, prompt_logprobs=0, max_tokens=1)
    for _ in range(10):
        batch = engine.step()
        assert batch is not None and batch.num_seqs == 2 and batch.num_rows <= 4
    assert len(engine.tokens("b")) == 11


def test_prompt_logprobs_survive_a_preemption_without_repeating() -> None:
    engine = Engine(num_blocks=8, context=32, budget=8)
    engine.add("hog", 8, arrival=0, max_tokens=20)
    engine.add("a", 12, arrival=1, max_tokens=12, prompt_logprobs=0)
    engine.run()
    assert engine.of(EventKind.RESUMED)
    entries = [entry for o in engine.outputs if o.request_id == "a" for entry in o.prompt_logprobs or ()]
    assert [entry.token_id for entry in entries] == [hash_token("a", i) for i in range(1, 12)]


# Events, gauges, cost


def test_events_tell_a_request_s_life_in_order() -> None:
    engine = Engine(budget=4)
    engine.add("a", 6, max_tokens=2)
    engine.run()
    life = [(event.kind.value, event.num_tokens) for event in engine.events if event.request_id == "a"]
    assert life == [
        ("queued", 0),
        ("prefix_hit", 0),
        ("scheduled", 4),
        ("scheduled", 2),
        ("first_token", 0),
        ("tokens", 1),
        ("scheduled", 1),
        ("tokens", 1),
        ("finished", 2),
    ]
    steps = engine.of(EventKind.STEP)
    assert [(event.num_tokens, event.of) for event in steps] == [(4, 1), (2, 1), (1, 1)]
    assert [event.sequence for event in engine.events] == list(range(len(engine.events)))


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    engine = Engine()
    prompt = list(range(17))
    engine.add("a", prompt, max_tokens=1)
    engine.run()
    (request,) = engine.add("b", prompt, max_tokens=1)
    engine.run()
    assert request.num_cached_tokens == 16
    assert next(o.num_cached_tokens for o in engine.outputs if o.request_id == "b") == 16
    assert request.status is RequestStatus.FINISHED


def count_calls(work: Callable[[], object]) -> int:
    """Calls of Python and C functions that `work` makes: a cost that no busy machine changes."""
    calls = 0

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_the_cost_of_a_step_does_not_grow_with_the_queue() -> None:
    def cost(num_waiting: int) -> int:
        engine = Engine(seats=4)
        for i in range(4 + num_waiting):
            engine.add(f"r{i}", [i % 900, 1, 2], arrival=i, max_tokens=9)
        for _ in range(3):
            engine.step()
        engine.scheduler.abort("r4", 0)

        def work() -> None:
            for _ in range(12):
                engine.step()

        engine.scheduler.check_integrity = lambda: None  # type: ignore[method-assign]
        return count_calls(work)

    small, large = cost(50), cost(20_000)
    assert large < small * 1.1
