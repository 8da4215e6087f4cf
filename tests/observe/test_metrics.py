"""The metrics fold: every count and time follows from the events, and nothing can make a counter fall."""

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.events import Event, EventKind
from headrace.observe.metrics import Metrics

SECOND = 1_000_000_000


@dataclass
class Stream:
    """Numbers events as one source does."""

    metrics: Metrics
    source: str = "engine"
    epoch: int = 1
    sequence: int = 0

    def send(self, kind: EventKind, at_s: float, request_id: str = "r", **details: Any) -> None:
        event = Event(kind, self.source, self.epoch, self.sequence, int(at_s * SECOND), request_id, **details)
        self.sequence += 1
        self.metrics.fold([event])


def values(metrics: Metrics) -> dict[str, float]:
    """Series without the model's label, which is always there."""
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    pairs = (line.rsplit(" ", 1) for line in lines)
    return {_bare(name): float(value) for name, value in pairs}


def _bare(name: str) -> str:
    return name.replace('model_name="toy"', "").replace("{,", "{").replace(",}", "}").removesuffix("{}")


def test_one_request_from_acceptance_to_its_end() -> None:
    metrics = Metrics("toy")
    api, engine = Stream(metrics, "api", 0), Stream(metrics)
    api.send(EventKind.ACCEPTED, 10.0, num_tokens=100)
    engine.send(EventKind.QUEUED, 10.1)
    engine.send(EventKind.PREFIX_HIT, 10.5, num_tokens=64, of=100)
    engine.send(EventKind.SCHEDULED, 10.5, num_tokens=36)
    engine.send(EventKind.STEP, 11.0, request_id="", num_tokens=36, of=1)
    engine.send(EventKind.FIRST_TOKEN, 11.0)
    engine.send(EventKind.TOKENS, 11.0, num_tokens=1)
    engine.send(EventKind.TOKENS, 11.25, num_tokens=1)
    engine.send(EventKind.TOKENS, 11.75, num_tokens=1)
    engine.send(EventKind.FINISHED, 12.0, num_tokens=2, of=100, detail="stop")
    found = values(metrics)
    expected = {
        "headrace_prompt_tokens_total": 100,
        "headrace_generation_tokens_total": 3,
        "headrace_wasted_tokens_total": 1,
        "headrace_prefix_cache_queries_total": 100,
        "headrace_prefix_cache_hits_total": 64,
        "headrace_time_to_first_token_seconds_count": 1,
        "headrace_time_to_first_token_seconds_sum": 1.0,
        "headrace_request_queue_time_seconds_sum": 0.5,
        "headrace_request_prefill_time_seconds_sum": 0.5,
        "headrace_request_decode_time_seconds_sum": 0.75,
        "headrace_inter_token_latency_seconds_count": 2,
        "headrace_inter_token_latency_seconds_sum": 0.75,
        "headrace_e2e_request_latency_seconds_sum": 2.0,
        "headrace_request_generation_tokens_sum": 2,
        "headrace_engine_steps_total": 1,
        "headrace_metric_anomalies_total": 0,
        'headrace_request_success_total{finished_reason="stop"}': 1,
    }
    assert {name: found[name] for name in expected} == expected


def test_a_prompt_with_several_answers_counts_once() -> None:
    metrics = Metrics("toy")
    api, engine = Stream(metrics, "api", 0), Stream(metrics)
    api.send(EventKind.ACCEPTED, 0, num_tokens=50)
    for choice in (0, 1):
        engine.send(EventKind.QUEUED, 0, choice=choice)
    for choice in (0, 1):
        engine.send(EventKind.SCHEDULED, 1, choice=choice, num_tokens=50)
        engine.send(EventKind.FIRST_TOKEN, 2 + choice, choice=choice)
        engine.send(EventKind.TOKENS, 2 + choice, choice=choice, num_tokens=1)
        engine.send(EventKind.FINISHED, 4, choice=choice, num_tokens=1, of=50, detail="length")
    found = values(metrics)
    assert found["headrace_prompt_tokens_total"] == 50 and found["headrace_generation_tokens_total"] == 2
    assert found["headrace_time_to_first_token_seconds_count"] == 1
    assert found["headrace_e2e_request_latency_seconds_count"] == 2
    assert found['headrace_request_success_total{finished_reason="length"}'] == 2


def test_refusals_preemptions_and_deaths_are_counted() -> None:
    metrics = Metrics("toy")
    stream = Stream(metrics)
    stream.send(EventKind.REFUSED, 0, detail="overloaded")
    stream.send(EventKind.PREEMPTED, 1)
    stream.send(EventKind.RESUMED, 2)
    stream.send(EventKind.ENGINE_DIED, 3, request_id="", detail="killed")
    stream.send(EventKind.ENGINE_READY, 4, request_id="")
    found = values(metrics)
    assert found['headrace_admission_rejections_total{reason="overloaded"}'] == 1
    assert found["headrace_num_preemptions_total"] == 1 and found["headrace_engine_deaths_total"] == 1


def test_lost_events_are_noticed_and_a_new_epoch_is_no_loss() -> None:
    metrics = Metrics("toy")
    stream = Stream(metrics)
    stream.send(EventKind.STEP, 0)
    stream.sequence += 1
    stream.send(EventKind.STEP, 1)
    restarted = Stream(metrics, epoch=2)
    restarted.send(EventKind.STEP, 2)
    restarted.send(EventKind.STEP, 3)
    assert values(metrics)["headrace_metric_anomalies_total"] == 1


def test_gauges_are_shares_and_counts() -> None:
    metrics = Metrics("toy")
    metrics.set_gauges(num_running=3, num_waiting=2, kv_blocks_used=25, kv_blocks_total=100)
    found = values(metrics)
    assert found["headrace_num_requests_running"] == 3 and found["headrace_num_requests_waiting"] == 2
    assert found["headrace_kv_cache_usage_perc"] == 0.25
    metrics.set_gauges(0, 0, 0, 0)
    assert values(metrics)["headrace_kv_cache_usage_perc"] == 0


def test_the_kv_cache_is_shown_with_its_dtype_once_there_is_one() -> None:
    metrics = Metrics("toy")
    metrics.set_kv_cache("", 0)
    assert b"headrace_kv_cache_bytes{" not in metrics.render()
    metrics.set_kv_cache("int8", 4096)
    assert b'headrace_kv_cache_bytes{kv_cache_dtype="int8",model_name="toy"} 4096.0' in metrics.render()


EVENTS = st.lists(
    st.builds(
        Event,
        kind=st.sampled_from(EventKind),
        source=st.sampled_from(["api", "engine"]),
        epoch=st.integers(0, 2),
        sequence=st.integers(0, 5),
        time_ns=st.integers(0, 10 * SECOND),
        request_id=st.sampled_from(["a", "b", ""]),
        choice=st.integers(0, 2),
        num_tokens=st.integers(-5, 50),
        of=st.integers(-5, 50),
        detail=st.sampled_from(["", "stop", "length"]),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=40)
@given(EVENTS)
def test_no_events_however_wrong_make_a_counter_fall(events: list[Event]) -> None:
    metrics = Metrics("toy")
    half = len(events) // 2
    metrics.fold(events[:half])
    before = values(metrics)
    metrics.fold(events[half:])
    after = values(metrics)
    for name, value in before.items():
        if name.split("{")[0].endswith(("_total", "_count", "_sum", "_bucket")) and "process_" not in name:
            assert 0 <= value <= after[name], name
