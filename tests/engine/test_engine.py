"""The loop without a process: errors keep their size, crossings are harmless, messages survive the wire."""

from dataclasses import replace

import msgspec
import pytest

from headrace.backend.base import BackendSpec
from headrace.backend.fake import FakeBackend, Faults
from headrace.base.clock import FakeClock
from headrace.core.events import Event, EventKind, EventRecorder
from headrace.core.kv_cache import KVCacheManager
from headrace.core.kv_group import KVGroup
from headrace.core.request import SamplingParams
from headrace.core.scheduler import Scheduler, StepLimits
from headrace.engine import messages
from headrace.engine.engine import BackendBrokenError, Engine
from headrace.engine.generation import GenerationRequest
from headrace.engine.messages import Abort, Finish, FromEngine, Output, Step, ToEngine
from headrace.engine.self_test import SelfTestRun
from headrace.engine.wire import add_message, core_requests

SPEC = BackendSpec((KVGroup("full", (0,), 1, 8),), (64,), 16, 100, 64, 32, 8, 512)


class Rig:
    """An engine on a fake clock, on which a test calls `steps`."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.clock = FakeClock()
        self.recorder = EventRecorder("engine", 1)
        kv = KVCacheManager(SPEC.kv_groups, SPEC.num_blocks, SPEC.block_size)
        limits = StepLimits(SPEC.max_seqs, SPEC.max_tokens, SPEC.max_rows, SPEC.max_model_len, SPEC.vocab_size)
        self.scheduler = Scheduler(limits, kv, self.recorder)
        backend = FakeBackend(SPEC, clock=self.clock, pace=self.clock.advance_ns, faults=faults)
        self.engine = Engine(self.scheduler, backend, self.clock)
        self.outputs: list[Output] = []
        self.events: list[Event] = []

    def add(self, request_id: str, num_prompt_tokens: int = 5, max_tokens: int = 4, **options: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = GenerationRequest(request_id, list(range(num_prompt_tokens)), params, **options)
        self.engine.handle(add_message(request, self.clock.now_ns()))

    def steps(self, count: int = 1000) -> list[Step]:
        done = []
        while self.engine.has_work and len(done) < count:
            done.append(self.engine.step())
            self.outputs += done[-1].outputs
            self.events += done[-1].events
        return done

    def ended(self, request_id: str) -> list[Output]:
        return [output for output in self.outputs if output.request_id == request_id and output.finish_reason]


def test_a_failing_step_fails_its_requests_and_no_others() -> None:
    rig = Rig(Faults(raise_at_steps=frozenset({1})))
    rig.add("in the step")
    rig.steps(1)
    rig.steps(1)
    rig.add("after it")
    rig.steps()
    (failed,) = rig.ended("in the step")
    assert failed.finish_reason == "error"
    assert failed.error is not None and "injected failure in step 1" in failed.error
    (served,) = rig.ended("after it")
    assert served.finish_reason == "length"
    rig.scheduler.check_integrity()
    assert rig.scheduler.gauges().kv_blocks_used == 0


def test_waiting_requests_survive_a_failing_step() -> None:
    rig = Rig(Faults(raise_at_steps=frozenset({0})))
    for i in range(SPEC.max_seqs + 3):
        rig.add(f"r{i}")
    rig.steps()
    reasons = [rig.ended(f"r{i}")[0].finish_reason for i in range(SPEC.max_seqs + 3)]
    assert reasons == ["error"] * SPEC.max_seqs + ["length"] * 3
    rig.scheduler.check_integrity()


def test_a_backend_that_fails_step_after_step_ends_the_engine() -> None:
    rig = Rig(Faults(raise_at_steps=frozenset(range(100))))
    for i in range(100):
        rig.add(f"r{i}")
    with pytest.raises(BackendBrokenError, match="injected"):
        rig.steps()


def test_one_request_that_turns_non_finite_fails_alone() -> None:
    rig = Rig(Faults(non_finite_token=90))
    rig.add("good")
    params = SamplingParams(temperature=0.0, max_tokens=4)
    rig.engine.handle(add_message(GenerationRequest("bad", [1, 90, 2], params), 0))
    rig.steps()
    assert rig.ended("bad")[0].finish_reason == "error"
    assert rig.ended("good")[0].finish_reason == "length"


def test_a_taken_id_is_the_second_ones_problem() -> None:
    rig = Rig()
    rig.add("twice")
    rig.add("twice")
    rig.steps()
    reasons = [output.finish_reason for output in rig.ended("twice")]
    assert sorted(str(reason) for reason in reasons) == ["error", "length"]


def test_messages_that_cross_on_the_way_are_harmless() -> None:
    rig = Rig()
    assert not rig.engine.handle(Abort("never seen"))
    assert not rig.engine.handle(Finish("never seen", 0, "stop", 1))
    rig.add("done")
    rig.steps()
    assert not rig.engine.handle(Abort("done"))
    assert not rig.engine.handle(Finish("done", 0, "stop", 1))


def test_an_idle_engine_still_reports_an_abort() -> None:
    rig = Rig()
    rig.add("a", n=2)
    assert rig.engine.handle(Abort("a"))
    assert not rig.engine.has_work
    step = rig.engine.step()
    assert [event.kind for event in step.events].count(EventKind.FINISHED) == 2
    assert step.gauges == messages.Gauges(0, 0, 0, 64)


def test_finish_counts_the_tokens_that_the_client_counted() -> None:
    rig = Rig()
    rig.add("a", max_tokens=100)
    rig.steps(6)
    rig.engine.handle(Finish("a", 0, "stop", 3))
    step = rig.engine.step()
    (finished,) = [event for event in step.events if event.kind is EventKind.FINISHED]
    assert (finished.num_tokens, finished.of, finished.detail) == (3, 5, "stop")


def test_a_resubmitted_request_goes_on_where_it_was() -> None:
    """What the client would send after a crash: prompt and output as two fields."""
    whole = Rig()
    whole.add("a", max_tokens=20)
    whole.steps()
    tokens = [token for output in whole.outputs for token in output.token_ids]
    request = GenerationRequest("a", list(range(5)), SamplingParams(temperature=0.0, max_tokens=20))
    for cut in (1, 7, 19):
        rig = Rig()
        rig.engine.handle(msgspec.structs.replace(add_message(request, 0), outputs=[tokens[:cut]]))
        rig.steps()
        assert [token for output in rig.outputs for token in output.token_ids] == tokens[cut:]


def test_the_self_test_leaves_no_event_and_no_block_and_can_be_cancelled() -> None:
    rig = Rig()
    rig.add("before")
    rig.steps()
    run = SelfTestRun(rig.engine, rig.recorder, rig.clock)
    for _ in range(3):
        assert run.step() is None
    run.cancel()
    rig.scheduler.check_integrity()
    run = SelfTestRun(rig.engine, rig.recorder, rig.clock)
    while (result := run.step()) is None:
        pass
    assert result.prefill_tokens_per_s > 0 and result.decode_tokens_per_s > 0
    rig.add("after")
    rig.steps()
    assert {event.request_id for event in rig.events} == {"before", "after", ""}
    assert [event.sequence for event in rig.events] == list(range(len(rig.events)))
    assert rig.scheduler.gauges().kv_blocks_used == 0


def test_sampling_params_survive_the_wire() -> None:
    params = SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias=((5, -100.0), (6, 1.5)),
        seed=(1 << 64) - 1,
        stop_token_ids=(1, 2),
        logprobs=0,
        prompt_logprobs=5,
    )
    request = GenerationRequest("id", [1, 2, 3], params, n=2, cache_salt="tenant")
    frame = msgspec.msgpack.encode(add_message(request, 123))
    first, second = core_requests(msgspec.msgpack.decode(frame, type=ToEngine))
    assert (first.params, first.prompt_token_ids, first.arrival_ns, first.cache_salt) == (
        params,
        [1, 2, 3],
        123,
        "tenant",
    )
    assert (first.choice, second.choice) == (0, 1)
    done = msgspec.structs.replace(add_message(request, 123), outputs=[[4], [5, 6]], done_choices=[0])
    (left,) = core_requests(done)
    assert (left.choice, left.output_token_ids) == (1, [5, 6])
    assert replace(params, seed=0) != params


def test_every_message_survives_the_wire() -> None:
    logprob = messages.TokenLogprob(1, -0.5, [(1, -0.5), (2, -1.0)])
    step = Step(
        3,
        [Output("a", 1, [1, 2], "stop", [logprob], [logprob], 4, None), Output("b", 0, [], "error", error="why")],
        [Event(EventKind.TOKENS, "engine", 1, 2, 3, "a", 1, 2, 0, "x")],
        messages.Gauges(1, 2, 3, 4),
        99,
    )
    up = [
        step,
        messages.Loading("weights", 0.5),
        messages.Ready(1, 2, 3, 4, 5, {"a": "b"}, 6),
        messages.SelfTest(1.0, 2.0),
        messages.Failed("why", "Kind"),
    ]
    for message in up:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FromEngine) == message
    for message in (Abort("a"), Finish("a", 0, "stop", 3), messages.Shutdown()):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToEngine) == message


@pytest.mark.parametrize(
    "junk", [b"", b"\x00", b"\xff" * 40, b"GET / HTTP/1.1\r\n\r\n", msgspec.msgpack.encode(["Add", 1])]
)
def test_junk_is_no_message(junk: bytes) -> None:
    for kind in (FromEngine, ToEngine):
        with pytest.raises(msgspec.DecodeError):
            msgspec.msgpack.decode(junk, type=kind)
