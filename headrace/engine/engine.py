"""Engine: the loop around one scheduler and one backend. Takes messages, runs steps, gives messages.

    handle(Add | Abort | Finish) ...   schedule -> submit -> collect -> update   -> one Step message

Pure of transport and of processes: the engine process, the in-process `LLM` and the simulation drive the same object.
Errors have sizes. One request: the scheduler fails it alone. One step: the requests that were in it fail, the engine
goes on. Whatever else is raised leaves `step`, and ends the engine; so does a backend that fails step after step.
"""

from headrace.backend.base import Backend
from headrace.base.clock import Clock
from headrace.base.errors import HeadraceError
from headrace.core.batch import Batch, StepResult
from headrace.core.outputs import StepOutputs
from headrace.core.request import FinishReason
from headrace.core.scheduler import Scheduler, SchedulerError
from headrace.engine.messages import Abort, Add, Finish, Output, Step
from headrace.engine.wire import core_requests, gauges_message, output_message

_MAX_FAILED_STEPS = 8  # in a row: the backend is broken, not the requests


class BackendBrokenError(HeadraceError):
    """The backend failed many steps in a row."""


class Engine:
    def __init__(self, scheduler: Scheduler, backend: Backend, clock: Clock) -> None:
        self.scheduler = scheduler
        self.backend = backend
        self._clock = clock
        self._refused: list[Output] = []
        self._failed_steps = 0
        self._next_step_id = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to report."""
        return bool(self._refused) or self.scheduler.has_work

    def handle(self, message: Add | Abort | Finish) -> bool:
        """Takes one message. True when it left something to report even if there is no step to run.

        An abort or a finish of a request that is not here any more is no error: the two sides cross on the way.
        """
        now_ns = self._clock.now_ns()
        if isinstance(message, Abort):
            return self.scheduler.abort(message.request_id, now_ns)
        if isinstance(message, Finish):
            reason = FinishReason(message.reason)
            return self.scheduler.finish(message.request_id, message.choice, reason, message.num_tokens, now_ns)
        try:
            self.scheduler.add(core_requests(message), now_ns)
        except SchedulerError as error:  # its id is taken: the one that has it goes on
            self._refused.append(Output(message.request_id, 0, [], FinishReason.ERROR.value, error=str(error)))
        return True

    def step(self) -> Step:
        """Computes one step if there is one to compute, and reports everything since the last report."""
        started_ns = self._clock.now_ns()
        batch = self.scheduler.schedule(started_ns)
        outputs = self.scheduler.drain() if batch is None else self._compute(batch)
        refused, self._refused = self._refused, []
        step_id, self._next_step_id = self._next_step_id, self._next_step_id + 1
        return Step(
            step_id=step_id,
            outputs=refused + [output_message(output) for output in outputs.outputs],
            events=outputs.events,
            gauges=gauges_message(self.scheduler.gauges()),
            step_ns=self._clock.now_ns() - started_ns,
        )

    def _compute(self, batch: Batch) -> StepOutputs:
        try:
            result = self._run(batch)
        except Exception as error:
            self._failed_steps += 1
            if self._failed_steps >= _MAX_FAILED_STEPS:
                raise BackendBrokenError(f"{self._failed_steps} steps in a row failed; the last: {error}") from error
            return self.scheduler.fail_step(f"the step that held this request failed: {error}", self._clock.now_ns())
        self._failed_steps = 0
        return self.scheduler.update(batch, result, self._clock.now_ns())

    def _run(self, batch: Batch) -> StepResult:
        self.backend.submit(batch)
        return self.backend.collect()
