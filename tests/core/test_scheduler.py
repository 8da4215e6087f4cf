"""Scheduler: one behaviour a test, on a stand-in for the backend that answers each row with 100 + its position."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from headrace.core.batch import Batch, OutputFlag, RowStatus, StepResult
from headrace.core.events import Event, EventKind, EventRecorder
from headrace.core.kv_cache import KVCacheManager
from headrace.core.kv_group import KVGroup
from headrace.core.outputs import ChoiceOutput, StepOutputs
from headrace.core.request import FinishReason, Request, RequestStatus, SamplingParams
from headrace.core.scheduler import Scheduler, SchedulerError, StepLimits

BLOCK = 4


class Engine:
    """The loop around a scheduler. `now` counts steps; `outputs` and `events` collect everything."""

    def __init__(
        self, num_blocks: int = 64, seats: int = 8, budget: int = 64, rows: int = 64, context: int = 200, **kv: bool
    ) -> None:
        self.kv = KVCacheManager((KVGroup("full", (0,), 1, 8),), (num_blocks,), BLOCK, **kv)
        limits = StepLimits(seats, budget, rows, context, vocab_size=1000)
        self.scheduler = Scheduler(limits, self.kv, EventRecorder("engine", 0))
        self.now = 0
        self.outputs: list[ChoiceOutput] = []
        self.events: list[Event] = []
        self.poisoned: set[int] = set()  # prompts that begin with this token give numbers that are not finite

    def add(self, name: str, prompt: int | list[int] = 6, n: int = 1, arrival: int = 0, **params: Any) -> list[Request]:
        tokens = [hash_token(name, i) for i in range(prompt)] if isinstance(prompt, int) else prompt
        settings = SamplingParams(**params)
        choices = [Request(name, tokens, settings, arrival, choice) for choice in range(n)]
        self.scheduler.add(choices, self.now)
        return choices

    def step(self, in_flight: Callable[[], object] = lambda: None) -> Batch | None:
        batch = self.scheduler.schedule(self.now)
        if batch is None:
            self.receive(self.scheduler.drain())
            return None
        in_flight()
        self.receive(self.scheduler.update(batch, self.answer(batch), self.now))
        self.scheduler.check_integrity()
        self.now += 1
        return batch

    def run(self, most: int = 500) -> "Engine":
        for _ in range(most):
            if self.step() is None:
                assert not self.scheduler.has_requests
                assert self.scheduler.gauges().kv_blocks_used == 0
                return self
        raise AssertionError(f"no end after {most} steps")

    def receive(self, outputs: StepOutputs) -> None:
        self.outputs.extend(outputs.outputs)
        self.events.extend(outputs.events)

    def answer(self, batch: Batch) -> StepResult:
        owners = np.searchsorted(batch.cu_seqlens_q, batch.output_rows, side="right") - 1
        samples = (batch.output_flags & OutputFlag.SAMPLE) != 0
        cu_tokens = np.zeros(batch.num_seqs + 1, np.int32)
        np.cumsum(np.bincount(owners[samples], minlength=batch.num_seqs), out=cu_tokens[1:])
        status = np.zeros(batch.num_seqs, np.uint8)
        first = batch.input_ids[batch.cu_seqlens_q[:-1]].tolist()
        for s, token in enumerate(first):
            if token in self.poisoned:
                status[s] = RowStatus.NON_FINITE
        k = max(0, int(batch.sampling.num_logprobs.max(initial=0)))
        return StepResult(
            step_id=batch.step_id,
            token_ids=(100 + batch.sampling.position[samples]).astype(np.int32),
            cu_tokens=cu_tokens,
            num_accepted=np.zeros(batch.num_seqs, np.int32),
            logprobs=np.tile(-np.arange(k + 1, dtype=np.float32), (batch.num_rows, 1)),
            top_ids=np.tile(np.arange(k, dtype=np.int32), (batch.num_rows, 1)),
            signals=np.zeros((batch.num_rows, 4), np.float32),
            status=status,
            hidden=np.empty((0, 0), np.float32),
            started_ns=0,
            ended_ns=0,
            phase_ns=np.empty(0, np.int64),
        )

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        mine = [o for o in self.outputs if (o.request_id, o.choice) == (name, choice)]
        return [token for output in mine for token in output.token_ids]

    def reason(self, name: str, choice: int = 0) -> FinishReason | None:
        mine = [o for o in self.outputs if (o.request_id, o.choice) == (name, choice)]
        return mine[-1].finish_reason if mine else None

    def of(self, kind: EventKind) -> list[Event]:
        return [event for event in self.events if event.kind is kind]


def hash_token(name: str, index: int) -> int:
    return sum(map(ord, name)) * 7 % 500 + index


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
