"""Scheduler: choices of one request, aborts in every state, faults and resumption; one behaviour a test."""

import numpy as np
import pytest
from scheduler_loop import Engine, hash_token

from headrace.core.events import EventKind
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.scheduler import SchedulerError

# Choices


def test_choices_share_the_prompt_and_copy_its_partial_block() -> None:
    engine = Engine()
    engine.add("a", 10, n=3, max_tokens=3)
    first = engine.step()
    assert first is not None and first.num_seqs == 1 and first.num_tokens == 10
    second = engine.step()
    assert second is not None
    assert np.diff(second.cu_seqlens_q).tolist() == [1, 1, 1]
    assert second.positions.tolist() == [[10, 9, 9]]
    tables = second.block_tables[0]
    assert (tables[:, :2] == tables[0, :2]).all()
    assert len(set(tables[:, 2].tolist())) == 3
    assert len(second.block_copies) == 2  # the last holder writes in place
    engine.run()
    assert [engine.tokens("a", choice) for choice in range(3)] == [[110, 111, 112]] * 3


def test_choices_differ_in_the_counter_of_the_generator() -> None:
    engine = Engine()
    engine.add("a", 5, n=2, seed=77, max_tokens=2)
    engine.step()
    batch = engine.step()
    assert batch is not None
    assert batch.sampling.choice.tolist() == [0, 1]
    assert batch.sampling.seed.tolist() == [77, 77]
    assert batch.sampling.position.tolist() == [6, 5]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_that_found_no_seat_beside_the_first_still_come(prefix_caching: bool) -> None:
    engine = Engine(seats=1, enable_prefix_caching=prefix_caching)
    engine.add("a", 10, n=3, max_tokens=2)
    engine.run()
    assert [engine.tokens("a", choice) for choice in range(3)] == [[110, 111]] * 3


def test_when_the_first_choice_fails_the_next_one_leads() -> None:
    engine = Engine()
    engine.poisoned = {hash_token("a", 0)}
    engine.add("a", 10, n=3, max_tokens=2)
    engine.step()
    assert engine.reason("a", 0) is FinishReason.ERROR
    engine.poisoned = set()
    engine.run()
    assert engine.tokens("a", 1) == engine.tokens("a", 2) == [110, 111]


def test_waiting_choices_are_counted() -> None:
    engine = Engine(budget=8)
    engine.add("a", 20, n=4)
    engine.step()
    assert engine.scheduler.gauges().num_waiting == 3
    assert engine.scheduler.gauges().num_running == 1
    engine.scheduler.abort("a", 0)
    assert engine.scheduler.gauges().num_waiting == 0


def test_a_request_id_in_use_is_refused() -> None:
    engine = Engine()
    engine.add("a")
    with pytest.raises(SchedulerError, match="already here"):
        engine.add("a")


# Aborts, in every state


def drive_to(engine: Engine, state: str) -> None:
    """Brings request "x" into a state."""
    if state == "waiting":
        engine.add("hog", 8, max_tokens=50)
        engine.step()
        engine.add("x", 8, n=2, max_tokens=5, arrival=9)
    elif state == "prefill":
        engine.add("x", 30, n=2, max_tokens=5)
        engine.step()
    elif state == "decode":
        engine.add("x", 8, n=2, max_tokens=50)
        for _ in range(3):
            engine.step()
    elif state == "preempted":
        engine.add("hog", 8, max_tokens=23)
        engine.add("x", 8, max_tokens=23, arrival=9)
        while not engine.of(EventKind.PREEMPTED):
            engine.step()


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted"])
def test_an_abort_frees_everything_within_one_step(state: str, in_flight: bool) -> None:
    seats = 1 if state == "waiting" else 8
    engine = Engine(num_blocks=8 if state == "preempted" else 64, seats=seats, budget=16, context=32)
    drive_to(engine, state)
    if in_flight:
        engine.step(in_flight=lambda: engine.scheduler.abort("x", engine.now))
    else:
        assert engine.scheduler.abort("x", engine.now)
        engine.step()
    assert not engine.scheduler.abort("x", engine.now)
    before = engine.tokens("x")
    others = [sequence.request.request_id for sequence in engine.scheduler.running]
    assert "x" not in others
    engine.run()
    assert engine.tokens("x") == before
    if "hog" in others:
        assert engine.reason("hog") is FinishReason.LENGTH
    finished = [event for event in engine.of(EventKind.FINISHED) if event.request_id == "x"]
    assert finished and all(event.detail == "abort" for event in finished)


def test_the_id_of_an_aborted_request_can_be_used_again_while_its_step_is_out() -> None:
    engine = Engine()
    engine.add("a", 6, max_tokens=9)

    def replace() -> None:
        engine.scheduler.abort("a", 0)
        engine.add("a", 3, max_tokens=1)

    engine.step(in_flight=replace)
    engine.run()
    assert engine.tokens("a") == [103]


def test_blocks_of_an_abort_in_flight_are_not_reused_by_that_step() -> None:
    engine = Engine(num_blocks=8)
    engine.add("a", 16, max_tokens=9)

    def abort() -> None:
        engine.scheduler.abort("a", 0)
        assert engine.kv.num_used_blocks == 4

    engine.step(in_flight=abort)
    assert engine.kv.num_used_blocks == 0


def test_aborting_a_stranger_changes_nothing() -> None:
    assert not Engine().scheduler.abort("nobody", 0)
    assert not Engine().scheduler.finish("nobody", 0, FinishReason.STOP, 1, 0)


@pytest.mark.parametrize("in_flight", [False, True])
def test_the_client_finishes_a_choice_and_only_what_it_counts_counts(in_flight: bool) -> None:
    engine = Engine()
    requests = engine.add("a", 6, n=2, max_tokens=20)
    for _ in range(4):
        engine.step()

    def finish() -> None:
        assert engine.scheduler.finish("a", 0, FinishReason.STOP, 2, engine.now)

    if in_flight:
        engine.step(in_flight=finish)
    else:
        finish()
    engine.run()
    event = next(event for event in engine.of(EventKind.FINISHED) if event.choice == 0)
    assert (event.num_tokens, event.of, event.detail) == (2, 6, "stop")
    assert requests[0].output_token_ids == [106, 107]
    assert len(engine.tokens("a", 1)) == 20


# Faults


def test_a_non_finite_row_fails_alone_and_leaves_nothing_in_the_prefix_cache() -> None:
    engine = Engine()
    engine.add("good", 12, max_tokens=4)
    engine.add("bad", [77, *range(300, 311)], max_tokens=4)
    engine.poisoned = {77}
    engine.run()
    assert engine.tokens("good") == [112, 113, 114, 115]
    assert engine.reason("bad") is FinishReason.ERROR
    engine.poisoned = set()
    engine.add("again", [77, *range(300, 311)], max_tokens=1)
    engine.run()
    assert [event.num_tokens for event in engine.of(EventKind.PREFIX_HIT) if event.request_id == "again"] == [0]
    assert engine.tokens("again") == [112]


def test_chunks_before_a_non_finite_row_do_not_enter_the_prefix_cache_either() -> None:
    engine = Engine(budget=4)
    engine.add("bad", [77, *range(300, 311)], max_tokens=4)
    engine.step()
    engine.step()
    assert engine.kv.pools[0].num_cached == 0
    engine.run()
    assert engine.kv.pools[0].num_cached > 0


def test_resumption_after_a_crash_continues_where_the_client_stood() -> None:
    engine = Engine()
    params = SamplingParams(max_tokens=5, repetition_penalty=1.2, logprobs=0)
    request = Request("a", [5, 6, 7], params, 0, output_token_ids=[103, 104, 105])
    engine.scheduler.add([request], 0)
    batch = engine.step()
    assert batch is not None
    assert batch.input_ids.tolist() == [5, 6, 7, 103, 104, 105]
    assert batch.sampling.penalty_counts.tolist() == [0, 0, 0, 1, 1, 1]
    engine.run()
    assert engine.tokens("a") == [106, 107]
    assert not engine.of(EventKind.FIRST_TOKEN)


@pytest.mark.parametrize(
    ("output", "reason"), [([103, 104], FinishReason.LENGTH), ([9], FinishReason.STOP), ([103, 9], FinishReason.STOP)]
)
def test_a_request_that_was_complete_before_the_crash_ends_at_once(output: list[int], reason: FinishReason) -> None:
    engine = Engine()
    request = Request("a", [5, 6, 7], SamplingParams(max_tokens=2, stop_token_ids=(9,)), 0, output_token_ids=output)
    engine.scheduler.add([request], 0)
    assert engine.step() is None
    assert engine.reason("a") is reason
    assert engine.tokens("a") == []


def test_only_the_choices_that_are_left_are_resubmitted() -> None:
    engine = Engine()
    params = SamplingParams(max_tokens=4)
    outputs = {1: [105], 3: []}
    choices = [Request("a", [1, 2, 3, 4, 5], params, 0, c, tokens) for c, tokens in outputs.items()]
    engine.scheduler.add(choices, 0)
    engine.run()
    assert engine.tokens("a", 1) == [106, 107, 108]
    assert engine.tokens("a", 3) == [105, 106, 107, 108]
