"""Metrics: a fold of the event stream into Prometheus series, under vLLM's names with our prefix.

Only events and gauges come in, so the numbers agree with the request log by construction. Live requests are the only
state: an entry appears with a request's first event and goes with the last FINISHED of its choices. Counters never take
a negative: a delta below zero is dropped and counted in `headrace_metric_anomalies_total`, as is a gap in the sequence
numbers of a source.

    ACCEPTED ..queue.. first SCHEDULED ..prefill.. FIRST_TOKEN ..decode.. FINISHED
    |--------------- time to first token ---------|
    |--------------------------------- end to end ---------------------------|
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from headrace.core.events import Event, EventKind

M = TypeVar("M", Counter, Gauge, Histogram)

# fmt: off
_TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_ITL = (.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
# Finer at the small end than vLLM's, where nearly every queue time of a healthy server falls.
_SPAN = (.001, .005, .01, .025, .05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
         960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
# fmt: on
_MAX_LIVE = 1 << 18  # entries; a lost FINISHED must not become a leak


@dataclass(slots=True)
class _Choice:
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_tokens: int = 0  # generated, what a stop string makes waste included


@dataclass(slots=True)
class _Live:
    """A request from its first event to its last."""

    since_ns: int
    num_prompt_tokens: int = 0
    scheduled: bool = False
    answered: bool = False
    choices: dict[int, _Choice] = field(default_factory=dict)


class Metrics:
    """All series of one served model, in a registry of their own."""

    def __init__(self, model_name: str, version: str = "") -> None:
        """`version` is the server's own."""
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._live: dict[str, _Live] = {}
        self._next_sequence: dict[tuple[str, int], int] = {}
        counter, histogram = self._counter, self._histogram
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens processed, cached ones included")
        self._generation_tokens = counter("generation_tokens", "Tokens generated")
        self._wasted_tokens = counter("wasted_tokens", "Generated tokens past a stop string, which nobody got")
        self._prefix_queries = counter("prefix_cache_queries", "Tokens looked up in the prefix cache")
        self._prefix_hits = counter("prefix_cache_hits", "Tokens found in the prefix cache")
        self._preemptions = counter("num_preemptions", "Requests that lost their KV blocks to others for a while")
        self._engine_deaths = counter("engine_deaths", "Times that the engine process died")
        self._steps = counter("engine_steps", "Steps of the engine")
        self._anomalies = counter("metric_anomalies", "Events that were lost or made no sense")
        self._finished = self._family(Counter, "request_success", "Finished answers", ("finished_reason",))
        self._refused = self._family(Counter, "admission_rejections", "Requests refused at the door", ("reason",))
        self._ttft = histogram("time_to_first_token_seconds", "From acceptance to the first token", _TTFT)
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens of an answer", _ITL)
        self._e2e = histogram("e2e_request_latency_seconds", "From acceptance to the end of an answer", _SPAN)
        self._queue = histogram("request_queue_time_seconds", "From acceptance to the first step", _SPAN)
        self._prefill = histogram("request_prefill_time_seconds", "From the first step to the first token", _SPAN)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last", _SPAN)
        self._prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._answer_sizes = histogram("request_generation_tokens", "Tokens of an answer", _TOKENS)
        self._step_tokens = histogram("iteration_tokens_total", "Tokens in a step", _STEP_TOKENS)
        self._running = self._gauge("num_requests_running", "Sequences in the running batch")
        self._waiting = self._gauge("num_requests_waiting", "Sequences waiting for their first step or to resume")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1")
        self._kv_blocks = self._gauge("kv_cache_blocks", "KV blocks there are")
        self._kv_bytes = self._family(Gauge, "kv_cache_bytes", "Bytes of KV cache there are", ("kv_cache_dtype",))
        info = self._family(Gauge, "build_info", "Constant 1", ("version",))
        info.labels(self._model_name, version).set(1)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The exposition text. May run on another thread than `fold`."""
        return generate_latest(self._registry)

    def set_gauges(self, num_running: int, num_waiting: int, kv_blocks_used: int, kv_blocks_total: int) -> None:
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        self._kv_usage.set(kv_blocks_used / kv_blocks_total if kv_blocks_total else 0.0)
        self._kv_blocks.set(kv_blocks_total)

    def set_kv_cache(self, dtype: str, num_bytes: int) -> None:
        """Nothing is shown before an engine was ready, when `dtype` is empty."""
        if dtype:
            self._kv_bytes.labels(self._model_name, dtype).set(num_bytes)

    def fold(self, events: Iterable[Event]) -> None:
        for event in events:
            self._check_sequence(event)
            self._fold_one(event)

    def _fold_one(self, event: Event) -> None:
        match event.kind:
            case EventKind.STEP:
                self._steps.inc()
                self._step_tokens.observe(max(0, event.num_tokens))
            case EventKind.TOKENS:
                self._tokens(event)
            case EventKind.SCHEDULED:
                self._scheduled(event)
            case EventKind.PREFIX_HIT:
                self._add(self._prefix_queries, event.of)
                self._add(self._prefix_hits, event.num_tokens)
            case EventKind.ACCEPTED:
                self._of(event).num_prompt_tokens = event.num_tokens
                self._prompt_sizes.observe(max(0, event.num_tokens))
            case EventKind.QUEUED:
                self._choice(event)
            case EventKind.FIRST_TOKEN:
                self._first_token(event)
            case EventKind.FINISHED:
                self._finish(event)
            case EventKind.PREEMPTED:
                self._preemptions.inc()
            case EventKind.REFUSED:
                self._live.pop(event.request_id, None)
                self._refused.labels(self._model_name, event.detail or "unknown").inc()
            case EventKind.ENGINE_DIED:
                self._engine_deaths.inc()
            case EventKind.RESUMED | EventKind.ENGINE_READY:
                pass

    def _scheduled(self, event: Event) -> None:
        live, choice = self._of(event), self._choice(event)
        if not choice.scheduled_ns:
            choice.scheduled_ns = event.time_ns
        if not live.scheduled:
            live.scheduled = True
            self._span(self._queue, live.since_ns, event.time_ns)

    def _first_token(self, event: Event) -> None:
        live, choice = self._of(event), self._choice(event)
        choice.first_token_ns = choice.last_token_ns = event.time_ns
        if not live.answered:
            live.answered = True
            self._span(self._ttft, live.since_ns, event.time_ns)
            self._add(self._prompt_tokens, live.num_prompt_tokens)
            if choice.scheduled_ns:
                self._span(self._prefill, choice.scheduled_ns, event.time_ns)

    def _tokens(self, event: Event) -> None:
        choice = self._choice(event)
        self._add(self._generation_tokens, event.num_tokens)
        choice.num_tokens += max(0, event.num_tokens)
        if choice.last_token_ns and event.time_ns != choice.last_token_ns:
            self._span(self._itl, choice.last_token_ns, event.time_ns)
        choice.last_token_ns = event.time_ns

    def _finish(self, event: Event) -> None:
        live, choice = self._of(event), self._choice(event)
        self._finished.labels(self._model_name, event.detail or "unknown").inc()
        self._answer_sizes.observe(max(0, event.num_tokens))
        self._span(self._e2e, live.since_ns, event.time_ns)
        if choice.first_token_ns:
            self._span(self._decode, choice.first_token_ns, choice.last_token_ns)
        if choice.num_tokens > event.num_tokens:
            self._add(self._wasted_tokens, choice.num_tokens - max(0, event.num_tokens))
        del live.choices[event.choice]
        if not live.choices:
            del self._live[event.request_id]

    def _of(self, event: Event) -> _Live:
        live = self._live.get(event.request_id)
        if live is None:
            if len(self._live) >= _MAX_LIVE:
                del self._live[next(iter(self._live))]
                self._anomalies.inc()
            live = self._live[event.request_id] = _Live(event.time_ns)
        return live

    def _choice(self, event: Event) -> _Choice:
        return self._of(event).choices.setdefault(event.choice, _Choice())

    def _check_sequence(self, event: Event) -> None:
        """A gap means that events were lost: the numbers are then low, and the anomaly counter says so."""
        key = (event.source, event.epoch)
        expected = self._next_sequence.get(key)
        if expected is None:  # the first of an epoch; older epochs of the source send nothing more
            self._next_sequence = {known: n for known, n in self._next_sequence.items() if known[0] != event.source}
        elif event.sequence != expected:
            self._anomalies.inc()
        self._next_sequence[key] = event.sequence + 1

    def _add(self, counter: Counter, amount: int) -> None:
        if amount < 0:
            self._anomalies.inc()
        else:
            counter.inc(amount)

    def _span(self, histogram: Histogram, from_ns: int, to_ns: int) -> None:
        if to_ns < from_ns:
            self._anomalies.inc()
        histogram.observe(max(0, to_ns - from_ns) / 1e9)

    def _family(self, kind: type[M], name: str, doc: str, labels: tuple[str, ...] = (), **options: Any) -> M:
        return kind(f"headrace_{name}", doc, ("model_name", *labels), registry=self._registry, **options)

    def _counter(self, name: str, doc: str) -> Counter:
        return self._family(Counter, name, doc).labels(self._model_name)

    def _gauge(self, name: str, doc: str) -> Gauge:
        return self._family(Gauge, name, doc).labels(self._model_name)

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        return self._family(Histogram, name, doc, buckets=buckets).labels(self._model_name)
