"""AsyncEngine: the asynchronous face of an engine that runs in a process of its own.

    generate -> checks -> admission -> ledger -> Add ... Step messages ... -> deltas -> reader
                                        |  Abort: the reader went away      Finish: a stop string was found

It owns admission and the ledger of live requests, and detokenises what the engine sends, so a stop string is noticed
however slowly its user reads. When the engine dies, requests that have produced something get EngineDeadError at once;
the others wait for the next process, one time: a request that kills its engine must not kill every one after it.
All of it runs on one event loop's thread; reading the model's text files and tokenising happen on helper threads.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.base.clock import Clock, SystemClock
from headrace.base.config import Config
from headrace.base.errors import EngineDeadError, HeadraceError, OverloadedError, RequestError, RequestFailedError
from headrace.core.admission import Admission
from headrace.core.events import Event, EventKind, EventRecorder
from headrace.core.request import FinishReason, SamplingParams
from headrace.engine.checks import check_generation
from headrace.engine.child import Watch
from headrace.engine.generation import EngineStatus, GenerationRequest
from headrace.engine.ledger import Generation, Ledger, LiveRequest
from headrace.engine.messages import Abort, Finish, FromEngine, Gauges, Output, Ready, SelfTest, Step
from headrace.engine.model_path import Report, find_model
from headrace.engine.model_text import ModelText
from headrace.engine.spawn import Spawned
from headrace.engine.supervisor import Listener, RestartPolicy, Supervisor
from headrace.engine.wire import add_message
from headrace.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Subscriber = Callable[[Sequence[Event]], None]

_MAX_ATTEMPTS = 2
_STOP_GRACE_S = 5.0
_REPORT_S = 0.1  # between two reports of a load


class AsyncEngine:
    def __init__(
        self,
        config: Config,
        clock: Clock | None = None,
        restart_policy: RestartPolicy | None = None,
        watch: Watch | None = None,
        spawned: Spawned | None = None,
    ) -> None:
        """Starts nothing yet, but may be given the first engine process. Must be made where an event loop runs."""
        self._config = config
        self._clock = clock or SystemClock()
        self._recorder = EventRecorder("api", 0)
        self._subscribers: list[Subscriber] = []
        self._ledger = Ledger(Admission(config.max_waiting))
        self._supervisor = Supervisor(
            config,
            Listener(self._on_message, self._on_death),
            restart_policy or RestartPolicy(),
            watch or Watch(),
            spawned,
        )
        self._text: ModelText | None = None
        self._ready: Ready | None = None
        self._gauges = Gauges(0, 0, 0, 0)
        self._draining = False
        self._loading: asyncio.Task[None] | None = None
        self._self_test: asyncio.Future[SelfTest] = asyncio.get_running_loop().create_future()

    # Life

    async def start(self) -> None:
        """Begins to load and returns; `status` tells how far it is, `wait_ready` waits for the end."""
        self._loading = asyncio.get_running_loop().create_task(self._load())

    async def wait_ready(self, report: Report | None = None) -> None:
        """Raises the typed error that made loading fail. `report` is told now and then how far it is."""
        ready = asyncio.ensure_future(self._loaded())
        try:
            while not (await asyncio.wait({ready}, timeout=_REPORT_S if report else None))[0]:
                status = self.status()
                if report is not None:
                    report(status.phase or status.state, status.fraction)
            ready.result()
        finally:
            ready.cancel()

    async def close(self, drain: float = 0.0) -> None:
        """Takes no new requests, lets live ones finish within `drain` seconds, fails the rest, ends the process."""
        self._draining = True
        if drain > 0 and self._supervisor.is_ready:
            try:
                async with asyncio.timeout(drain):
                    await self._ledger.wait_idle()
            except TimeoutError:
                log.warning("%d requests did not finish within %g s", len(self._ledger), drain)
        for live in self._ledger:
            self._fail(live, EngineDeadError("the server is shutting down", code="engine_stopped"))
        await self._supervisor.stop(_STOP_GRACE_S)
        if self._loading is not None:
            await asyncio.wait({self._loading})  # a thread that reads a file cannot be interrupted
        if self._text is not None:
            await asyncio.to_thread(self._text.close)
        self._self_test.cancel()

    def status(self) -> EngineStatus:
        status = self._supervisor.status()
        if self._draining and status.state != "dead":
            return EngineStatus("draining", details=status.details)
        if status.state == "ready" and self._text is None:
            return EngineStatus("loading", "reading the tokenizer", 1.0, details=status.details)
        return status

    # What the model is; needs a ready engine

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt plus output."""
        return self._require_ready().max_model_len

    @property
    def vocab_size(self) -> int:
        """Width of the model's output: every token id is below it."""
        return self._require_ready().vocab_size

    @property
    def summary(self) -> Mapping[str, str]:
        """What was chosen at start and why, label -> text."""
        return self._require_ready().summary

    @property
    def tokenizer(self) -> Tokenizer:
        return self._require_text().tokenizer

    def default_params(self) -> SamplingParams:
        """The model's own sampling defaults; `stop_token_ids` holds every id that ends a turn."""
        return self._require_text().defaults

    def choose_seed(self) -> int:
        """For a request whose user gave none: the configured base seed, or a fresh one."""
        return self._config.seed or secrets.randbits(63)

    @property
    def gauges(self) -> Gauges:
        """As of the engine's last step; all zero while there is no engine."""
        return self._gauges

    @property
    def kv_cache(self) -> tuple[str, int]:
        """Its dtype and bytes, of the engine that was ready last; ("", 0) before the first."""
        return (self._ready.kv_dtype, self._ready.kv_bytes) if self._ready else ("", 0)

    @property
    def num_live(self) -> int:
        """Requests that were admitted and have not ended."""
        return len(self._ledger)

    async def wait_self_test(self) -> SelfTest:
        """The measured speed, once there is one. Cancelled when the engine is closed before."""
        return await asyncio.shield(self._self_test)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Calls `subscriber` with every event, the engine's and our own, in order. Returns what ends that."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    # Text

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return await self._require_text().encode(text, add_special_tokens)

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """See ModelText.encode_chat."""
        return await self._require_text().encode_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )

    # Generation

    def generate(self, request: GenerationRequest) -> Generation:
        """Admits a request and sends it down; the result yields its deltas.

        Raises here, before anything is sent: ContextLengthError, OverloadedError, EngineDeadError, RequestError.
        Closing the result, cancelling its reader or dropping it aborts the request.
        """
        try:
            live = self._admit(request)
        except RequestError as error:
            self._publish(EventKind.REFUSED, request.request_id, detail=error.code or type(error).__name__)
            raise
        self._publish(EventKind.ACCEPTED, request.request_id, num_tokens=len(request.prompt_token_ids))
        self._send(live)
        return Generation(live, self._abandon, asyncio.get_running_loop())

    def _admit(self, request: GenerationRequest) -> LiveRequest:
        ready, text = self._require_ready(), self._require_text()
        if self._draining or not self._supervisor.is_ready:
            raise EngineDeadError(f"the engine is {self.status().state}", code="engine_not_ready")
        check_generation(request, ready.max_model_len, ready.vocab_size)
        now_ns = self._clock.now_ns()
        retry_after_s = self._ledger.retry_after_s(request.n, now_ns)
        if retry_after_s is not None:
            waiting = f"{self._ledger.num_waiting} answers wait, at most {self._config.max_waiting} may (--max-waiting)"
            raise OverloadedError(f"the queue is full: {waiting}", retry_after=retry_after_s)
        live = LiveRequest(request, now_ns, text.tokenizer)
        self._ledger.enter(live)
        return live

    def _send(self, live: LiveRequest) -> None:
        live.attempts += 1
        self._supervisor.send(add_message(live.request, live.arrival_ns))

    def _abandon(self, live: LiveRequest) -> None:
        """The user went away. Harmless for a request that has ended."""
        request_id = live.request.request_id
        if self._ledger.get(request_id) is live:
            self._ledger.leave(live, None, self._clock.now_ns())
            self._supervisor.send(Abort(request_id))

    def _fail(self, live: LiveRequest, error: RequestError) -> None:
        for choice, stream in live.streams.items():
            self._recorder.record(
                EventKind.FINISHED,
                self._clock.now_ns(),
                live.request.request_id,
                choice,
                num_tokens=stream.num_output_tokens,
                of=len(live.request.prompt_token_ids),
                detail=FinishReason.ERROR.value,
            )
        self._ledger.leave(live, error, self._clock.now_ns())
        self._tell(self._recorder.drain())

    # From the engine

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Step):
            self._on_step(message)
        elif isinstance(message, Ready):
            self._ready = message
            self._ledger.num_seats = message.max_num_seqs
            self._gauges = Gauges(0, 0, 0, message.num_blocks)
            self._publish(EventKind.ENGINE_READY)
            for live in self._ledger:
                self._send(live)
        elif isinstance(message, SelfTest) and not self._self_test.done():
            self._self_test.set_result(message)

    def _on_step(self, step: Step) -> None:
        self._gauges = step.gauges
        if self._ledger.num_waiting:
            for event in step.events:
                if event.kind is EventKind.SCHEDULED:
                    self._ledger.scheduled(event.request_id, event.choice, event.time_ns)
        self._tell(step.events)
        for output in step.outputs:
            live = self._ledger.get(output.request_id)
            if live is not None and output.choice in live.streams:
                self._on_output(live, output)

    def _on_output(self, live: LiveRequest, output: Output) -> None:
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self._drop(live, output.error or "the engine aborted this request")
            return
        stream = live.streams[output.choice]
        try:
            delta = stream.push(output)
        except Exception as error:  # one request's text must not stop the others
            log.exception("request %s", live.request.request_id)
            self._drop(live, f"its output could not be turned into text: {error}")
            return
        live.has_output = live.has_output or bool(output.token_ids)
        if delta is None:
            return
        if stream.stop_string is not None and output.finish_reason is None:
            tokens = stream.num_output_tokens
            self._supervisor.send(Finish(live.request.request_id, output.choice, FinishReason.STOP.value, tokens))
        live.put(delta)
        if delta.finish_reason is not None:
            self._ledger.finished(live, output.choice, self._clock.now_ns())

    def _drop(self, live: LiveRequest, problem: str) -> None:
        """Fails one request, of which the engine may still hold some choices."""
        self._ledger.leave(live, RequestFailedError(problem, code="request_failed"), self._clock.now_ns())
        self._supervisor.send(Abort(live.request.request_id))

    def _on_death(self, reason: str, restarts: bool) -> None:
        log.error("%s; %s", reason, "starting another" if restarts else "giving up")
        self._gauges = Gauges(0, 0, 0, 0)
        self._publish(EventKind.ENGINE_DIED, detail=reason)
        for live in self._ledger:
            if restarts and not live.has_output and live.attempts < _MAX_ATTEMPTS:
                self._ledger.restarted(live)
            else:
                self._fail(live, EngineDeadError(f"the engine died: {reason}", code="engine_died"))

    # Small helpers

    async def _loaded(self) -> None:
        if self._loading is None:
            raise EngineDeadError("the engine was not started", code="engine_stopped")
        await asyncio.shield(self._loading)
        await self._supervisor.wait_ready()

    async def _load(self) -> None:
        try:
            path = await asyncio.to_thread(find_model, self._config, self._report)
            if self._draining:
                return
            self._supervisor.start(str(path))
            self._text = await asyncio.to_thread(ModelText.load, self._config, path)
            self._text.start()
        except HeadraceError as error:
            await self._supervisor.stop(0.0)
            self._supervisor.give_up(error)
        except Exception as error:
            log.exception("loading %s", self._config.model)
            await self._supervisor.stop(0.0)
            self._supervisor.give_up(HeadraceError(f"loading {self._config.model} failed: {error!r}"))

    def _report(self, phase: str, fraction: float) -> None:
        """Called on the thread that fetches the model, which an exception stops."""
        if self._draining:
            raise EngineDeadError("the engine was shut down", code="engine_stopped")
        self._supervisor.report(phase, fraction)

    def _require_ready(self) -> Ready:
        if self._ready is None:
            raise EngineDeadError("the model is not loaded", code="engine_not_ready")
        return self._ready

    def _require_text(self) -> ModelText:
        if self._text is None:
            raise EngineDeadError("the model is not loaded", code="engine_not_ready")
        return self._text

    def _publish(self, kind: EventKind, request_id: str = "", *, num_tokens: int = 0, detail: str = "") -> None:
        self._recorder.record(kind, self._clock.now_ns(), request_id, num_tokens=num_tokens, detail=detail)
        self._tell(self._recorder.drain())

    def _tell(self, events: Sequence[Event]) -> None:
        for subscriber in list(self._subscribers):
            try:
                subscriber(events)
            except Exception:  # an observer's defect must not stop what it observes
                log.exception("an event subscriber failed")
