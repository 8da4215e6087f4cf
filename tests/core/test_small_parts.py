"""BlockTable, PenaltyHistory, WaitingQueue, EventRecorder, Admission: each against the obvious."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.admission import MEASURED_DEPARTURES, UNMEASURED_RETRY_S, Admission
from headrace.core.block_table import BlockTable
from headrace.core.events import EventKind, EventRecorder
from headrace.core.penalties import PenaltyHistory, uses_penalties
from headrace.core.policy import order
from headrace.core.request import Request, SamplingParams
from headrace.core.sequence import Family, Sequence
from headrace.core.waiting import WaitingQueue

SECOND = 1_000_000_000


def test_a_block_table_grows_and_lets_its_first_blocks_go() -> None:
    table = BlockTable([5, 6])
    for block in range(20):
        table.append(block)
    assert len(table) == 22
    assert table[21] == 19
    assert [table.drop_first(), table.drop_first()] == [5, 6]
    assert table.view[:3].tolist() == [-1, -1, 0]
    assert table.live() == list(range(20))
    assert table.num_live == 20
    assert table.replace(2, 77) == 0
    assert table.live()[0] == 77


@given(prompt=st.lists(st.integers(0, 9), min_size=1), output=st.lists(st.integers(0, 20)), split=st.integers(0, 30))
def test_penalty_history_counts_like_a_counter(prompt: list[int], output: list[int], split: int) -> None:
    """Whether output was there at arrival (resubmission) or came token by token."""
    request = Request("r", prompt, SamplingParams(), 0, output_token_ids=output[:split])
    history = PenaltyHistory(request)
    for token in output[split:]:
        history.add(token)
    counts = Counter(output)
    assert dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True)) == {
        token: counts[token] for token in {*prompt, *output}
    }


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_needs_history(name: str) -> None:
    assert uses_penalties(SamplingParams(**{name: 1.5}))
    assert not uses_penalties(SamplingParams())


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.integers(0, 9)), max_size=300))
def test_the_waiting_queue_is_a_sorted_list(steps: list[tuple[str, int]]) -> None:
    queue, model = WaitingQueue(), []
    for ticket, (step, arrival) in enumerate(steps):
        if step == "push":
            request = Request(f"r{ticket}", [1], SamplingParams(), arrival)
            sequence = Sequence(request, order(request, ticket), Family())
            queue.push(sequence)
            model.append(sequence)
            model.sort(key=lambda waiting: waiting.place)
        elif model and step == "pop":
            assert queue.peek() is model[0]
            assert queue.pop() is model.pop(0)
        elif model:
            sequence = model.pop(arrival % len(model))
            queue.remove(sequence)
            assert sequence not in queue
        assert len(queue) == len(model)
    assert len(queue._heap) <= 2 * len(model) + 65, "removed entries pile up"


def test_the_waiting_queue_refuses_a_second_place() -> None:
    request = Request("r", [1], SamplingParams(), 0)
    sequence = Sequence(request, order(request, 0), Family())
    queue = WaitingQueue()
    queue.push(sequence)
    with pytest.raises(ValueError, match="already waiting"):
        queue.push(sequence)


def test_order_is_arrival_then_ticket_then_choice() -> None:
    def place(arrival: int, ticket: int, choice: int) -> tuple[int, int, int]:
        return order(Request("r", [1], SamplingParams(), arrival, choice), ticket)

    assert place(1, 9, 9) < place(2, 0, 0)
    assert place(1, 1, 9) < place(1, 2, 0)
    assert place(1, 1, 0) < place(1, 1, 1)


def test_events_are_numbered_without_gaps_across_drains() -> None:
    recorder = EventRecorder("engine", 3)
    recorder.record(EventKind.QUEUED, 10, "r", 1)
    first = recorder.drain()
    recorder.record(EventKind.TOKENS, 11, "r", 1, num_tokens=4)
    second = recorder.drain()
    assert [(event.sequence, event.epoch, event.source, event.time_ns) for event in first + second] == [
        (0, 3, "engine", 10),
        (1, 3, "engine", 11),
    ]
    assert second[0].num_tokens == 4
    assert recorder.drain() == []


def test_admission_takes_all_or_none_up_to_its_bound() -> None:
    admission = Admission(10)
    assert admission.decide(6, 4, 0).admitted
    assert not admission.decide(7, 4, 0).admitted
    assert not Admission(0).decide(0, 1, 0).admitted


def test_retry_after_is_the_time_in_which_enough_leave() -> None:
    admission = Admission(10)
    assert admission.decide(10, 1, 0).retry_after_s == UNMEASURED_RETRY_S
    for second in range(11):
        admission.departed(2, 10, second * SECOND)
    rate = admission.departures_per_s(10 * SECOND)
    assert rate == pytest.approx(2.1)
    assert admission.decide(10, 21, 10 * SECOND).retry_after_s == pytest.approx(10.0)
    assert admission.decide(10, 1, 10 * SECOND).retry_after_s == 1.0


def test_a_stalled_engine_makes_the_wait_longer_and_never_endless() -> None:
    admission = Admission(1)
    admission.departed(4, 5, 0)
    soon = admission.decide(1, 10, 1 * SECOND).retry_after_s
    later = admission.decide(1, 10, 100 * SECOND).retry_after_s
    assert soon < later < admission.decide(1, 10, 10**6 * SECOND).retry_after_s == 600.0


def test_departures_to_an_empty_queue_say_nothing_about_speed() -> None:
    admission = Admission(1)
    admission.departed(MEASURED_DEPARTURES, 3, 0)
    admission.departed(1, 0, SECOND)
    assert admission.departures_per_s(2 * SECOND) is None
