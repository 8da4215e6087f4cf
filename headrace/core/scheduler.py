"""Scheduler: which tokens are computed in the next step, and what the results mean.

There is no prefill phase and no decode phase. A request has `num_computed_tokens`; each step lets it catch up with the
tokens it knows, within `max_num_batched_tokens`. Chunked prefill, prefix hits, preemption, forks and resumption after a
crash are this one subtraction.

    schedule   1. running sequences, earliest first: each has one token of the budget for sure, the earliest the rest;
                  no block left: the latest running one is preempted (recomputed later; it keeps its place)
               2. waiting sequences, earliest first, while seats, budget and blocks for all their known tokens last
    update     applies results in the order of the batch; a sequence that ended meanwhile is passed over

Exactly one step is out at a time. The scheduler has no clock (time is passed in), does no I/O and knows no model. It
trusts requests: the border has validated them. The cost of a step does not depend on how many wait.
"""

import bisect
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from headrace.base.errors import HeadraceError
from headrace.core.batch import Batch, StepResult
from headrace.core.batch_builder import BatchBuilder, ScheduledSequence
from headrace.core.events import EventKind, EventRecorder
from headrace.core.kv_cache import KVCacheManager, PrefixMatch
from headrace.core.outputs import ChoiceOutput, Gauges, StepOutputs, TokenLogprob
from headrace.core.plan import Plan
from headrace.core.policy import order
from headrace.core.request import FinishReason, Request, RequestStatus
from headrace.core.results import SequenceResult, split_result
from headrace.core.sequence import NO_ROW, Family, Sequence
from headrace.core.waiting import WaitingQueue

NON_FINITE_ERROR = "the model produced numbers that are not finite for this request; other requests are not affected"


class SchedulerError(HeadraceError):
    """The scheduler was called out of order: a defect in the engine loop."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step and one sequence may hold. Tokens and rows of a step bound `max_num_seqs` too."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_rows: int
    max_model_len: int
    vocab_size: int


class Scheduler:
    def __init__(self, limits: StepLimits, kv: KVCacheManager, recorder: EventRecorder) -> None:
        self.max_num_seqs = min(limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_rows)
        self.max_model_len = min(limits.max_model_len, kv.capacity_tokens)
        self.kv = kv
        self.running: list[Sequence] = []  # in policy order
        self.waiting = WaitingQueue()
        self._limits = limits
        self._recorder = recorder
        self._builder = BatchBuilder(kv.block_size, limits.vocab_size)
        self._families: dict[str, Family] = {}
        self._num_followers = 0
        self._outputs: list[ChoiceOutput] = []
        self._step: Plan | None = None
        self._next_step_id = 0
        self._next_ticket = 0

    # Requests come and go

    def add(self, choices: Sequences[Request], now_ns: int) -> None:
        """Takes the choices of one user request: same request_id, prompt and params; finished choices are left out.

        One that cannot be served gets an ERROR output, one that is complete already (resubmitted after a crash) its
        finish reason; both come with the next `update` or `drain`. The prompt is computed once, by the first choice.
        Its logprobs go to every choice, before or with the first token; not again once any of the choices has output.
        """
        request_id = choices[0].request_id
        if request_id in self._families:
            raise SchedulerError(f"request {request_id} is already here")
        family = self._families[request_id] = Family()
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        for request in choices:
            sequence = Sequence(request, order(request, ticket), family)
            family.members[request.choice] = sequence
            family.followers.append(sequence)
            self._num_followers += 1
            self._recorder.record(EventKind.QUEUED, now_ns, request_id, request.choice)
        fresh = not any(request.output_token_ids for request in choices)
        self._lead(family, 0 if fresh and choices[0].params.prompt_logprobs is not None else NO_ROW, now_ns)

    def abort(self, request_id: str, now_ns: int) -> bool:
        """Ends all choices of a request, whatever they are doing. False where it is not here (any more)."""
        family = self._families.get(request_id)
        if family is None:
            return False
        family.prompt_done = True  # nobody takes the lead any more
        for sequence in list(family.members.values()):
            self._retire(sequence, FinishReason.ABORT, now_ns)
        return True

    def finish(self, request_id: str, choice: int, reason: FinishReason, num_tokens: int, now_ns: int) -> bool:
        """The client ends a choice (stop string): `num_tokens` output tokens count. False where it is not here."""
        family = self._families.get(request_id)
        sequence = family.members.get(choice) if family else None
        if sequence is None:
            return False
        del sequence.request.output_token_ids[num_tokens:]
        self._retire(sequence, reason, now_ns)
        return True

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def has_requests(self) -> bool:
        return bool(self._families)

    def gauges(self) -> Gauges:
        num_waiting = len(self.waiting) + self._num_followers
        return Gauges(len(self.running), num_waiting, self.kv.num_used_blocks, self.kv.num_blocks)

    def drain(self) -> StepOutputs:
        """Outputs and events since the last `update` or `drain`."""
        outputs, self._outputs = self._outputs, []
        return StepOutputs(outputs, self._recorder.drain())

    # Down: a step is put together

    def schedule(self, now_ns: int) -> Batch | None:
        """The next step, which the caller must run and give to `update`; None when there is nothing to compute."""
        if self._step is not None:
            raise SchedulerError("a step is out: update comes before the next schedule")
        plan = Plan(self._limits.max_num_batched_tokens, self._limits.max_rows)
        if self._continue_running(plan, now_ns):
            self._admit_waiting(plan, now_ns)
        if not plan.scheduled:
            return None
        step_id, self._next_step_id = self._next_step_id, self._next_step_id + 1
        batch = self._builder.build(step_id, plan.scheduled, plan.copies)
        self._step = plan
        self.kv.begin_step(step_id)
        return batch

    def _continue_running(self, plan: Plan, now_ns: int) -> bool:
        """Schedules running sequences, each with at least one token. False when blocks ran out."""
        calm = True
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            later = len(self.running) - index - 1
            want = sequence.wanted(plan.tokens - later, plan.rows - later)
            while not (granted := self.kv.fit(sequence.request, want)):
                calm = False
                victim = self.running.pop()
                self._preempt(victim, now_ns)
                if victim is sequence:
                    break
            if granted:
                self._take(plan, sequence, granted, now_ns)
            index += 1
        return calm

    def _admit_waiting(self, plan: Plan, now_ns: int) -> None:
        reserved: list[int] | None = None
        while self.waiting and plan.tokens and plan.rows and len(self.running) < self.max_num_seqs:
            sequence = self.waiting.peek()
            request = sequence.request
            match = self._match(sequence)
            if reserved is None:
                reserved = self.kv.reserve([running.request for running in self.running])
            if not self.kv.can_admit(match, request.num_tokens, reserved):
                return
            self.waiting.pop()
            self._start(sequence, match, now_ns)
            granted = self.kv.fit(request, sequence.wanted(plan.tokens, plan.rows))
            self._take(plan, sequence, granted, now_ns)
            reserved = [a + b for a, b in zip(reserved, self.kv.reserve([request]), strict=True)]

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """The longest KV that a waiting sequence can take over: from the prefix index or from a choice beside it."""
        request = sequence.request
        best = self.kv.match_prefix(request, sequence.reusable)
        shareable = request.num_prompt_tokens - 1
        if not best.num_tokens < shareable <= sequence.reusable:
            return best
        for other in sequence.family.members.values():
            if other.verified:
                fork = self.kv.match_fork(other.request, shareable)
                if fork is not None:
                    return fork
        return best

    def _start(self, sequence: Sequence, match: PrefixMatch, now_ns: int) -> None:
        request = sequence.request
        self.kv.admit(request, match)
        request.num_computed_tokens = match.num_tokens
        sequence.prepare()
        bisect.insort(self.running, sequence, key=lambda running: running.place)
        if request.status is RequestStatus.PREEMPTED:
            self._record(EventKind.RESUMED, sequence, now_ns)
        else:
            request.num_cached_tokens = min(match.num_tokens, request.num_prompt_tokens - 1)
        request.status = RequestStatus.RUNNING
        if sequence.reusable > 0:
            self._record(EventKind.PREFIX_HIT, sequence, now_ns, match.num_tokens, request.num_tokens)

    def _take(self, plan: Plan, sequence: Sequence, num_tokens: int, now_ns: int) -> None:
        request = sequence.request
        copies = self.kv.allocate(request, num_tokens)
        start, tables = request.num_computed_tokens, self.kv.block_tables(request)
        scheduled = ScheduledSequence(
            request, start, num_tokens, tables, sequence.first_row, sequence.samples, sequence.history
        )
        plan.take(sequence, scheduled, copies)
        self._recorder.record_tokens(EventKind.SCHEDULED, now_ns, request.request_id, request.choice, num_tokens)

    def _preempt(self, sequence: Sequence, now_ns: int) -> None:
        """Takes all blocks back. Nothing that was produced is lost: prompt and output are computed again later."""
        request = sequence.request
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        sequence.verified = False
        self.waiting.push(sequence)
        self._record(EventKind.PREEMPTED, sequence, now_ns)

    # Up: results are applied

    def update(self, batch: Batch, result: StepResult, now_ns: int) -> StepOutputs:
        """Applies the result of the step that `schedule` gave last. Returns everything since the last `drain`."""
        plan = self._step
        if plan is None or batch.step_id != result.step_id or batch.step_id != self._next_step_id - 1:
            raise SchedulerError(f"result of step {result.step_id} does not belong to the step that is out")
        parts = split_result(batch, result, plan.scheduled)
        self._step = None
        self.kv.end_step(batch.step_id)
        for sequence, scheduled, part in zip(plan.sequences, plan.scheduled, parts, strict=True):
            if sequence.request.status is RequestStatus.RUNNING:
                self._apply(sequence, scheduled, part, now_ns)
        self._recorder.record(EventKind.STEP, now_ns, num_tokens=batch.num_tokens, of=batch.num_seqs)
        return self.drain()

    def fail_step(self, error: str, now_ns: int) -> StepOutputs:
        """The backend could not run the step that is out: the sequences in it fail with `error`, all others go on."""
        plan, self._step = self._step, None
        if plan is None:
            raise SchedulerError("no step is out")
        self.kv.end_step(self._next_step_id - 1)
        for sequence in plan.sequences:
            if sequence.request.status is RequestStatus.RUNNING:
                self._fail(sequence, error, now_ns)
        return self.drain()

    def _apply(self, sequence: Sequence, scheduled: ScheduledSequence, part: SequenceResult, now_ns: int) -> None:
        request = sequence.request
        if not part.finite:
            self._fail(sequence, NON_FINITE_ERROR, now_ns)
            return
        request.num_computed_tokens = scheduled.end
        if part.num_rows:
            self.kv.commit(request)
            sequence.verified = True
        if part.prompt_logprobs:
            sequence.first_row = scheduled.prompt_rows.stop
            sequence.family.prompt_logprobs.extend(part.prompt_logprobs)
        if not sequence.family.prompt_done:
            self._share_prompt(sequence, now_ns)
        token_ids, reason = self._accept(sequence, part.token_ids, now_ns)
        if token_ids or reason or part.prompt_logprobs:
            logprobs = part.logprobs and part.logprobs[: len(token_ids)]
            self._output(sequence, token_ids, reason, logprobs, part.prompt_logprobs)
        if reason is not None:
            self._retire(sequence, reason, now_ns)

    def _accept(self, sequence: Sequence, token_ids: list[int], now_ns: int) -> tuple[list[int], FinishReason | None]:
        """Appends new tokens up to the one that ends the sequence. Returns those that count, and why it ended."""
        request, count = sequence.request, 0
        reason = None if sequence.samples else sequence.verdict(self.max_model_len)
        while count < len(token_ids) and reason is None:
            request.output_token_ids.append(token_ids[count])
            if sequence.history is not None:
                sequence.history.add(token_ids[count])
            count += 1
            reason = sequence.verdict(self.max_model_len)
        if count:
            if request.num_output_tokens == count:
                self._record(EventKind.FIRST_TOKEN, sequence, now_ns)
            self._recorder.record_tokens(EventKind.TOKENS, now_ns, request.request_id, request.choice, count)
        return token_ids[:count], reason

    # Places of a sequence: followers -> waiting <-> running -> gone

    def _lead(self, family: Family, first_row: int, now_ns: int) -> None:
        """The next follower that is not complete already becomes the leader; `first_row` is what is owed by then."""
        family.leader = None
        while family.followers and family.leader is None:
            sequence = self._next_follower(family)
            sequence.first_row = first_row
            if self._enqueue(sequence, now_ns):
                family.leader = sequence

    def _share_prompt(self, sequence: Sequence, now_ns: int) -> None:
        """Once the leader has computed the prompt, its followers queue up to share it."""
        family, request = sequence.family, sequence.request
        if request.num_computed_tokens < request.num_prompt_tokens - (not sequence.samples):
            return
        family.prompt_done = True
        while family.followers:
            self._enqueue(self._next_follower(family), now_ns)

    def _next_follower(self, family: Family) -> Sequence:
        """Takes it out of its place, and gives it what the leader learned about the prompt."""
        self._num_followers -= 1
        sequence = family.followers.popleft()
        if family.prompt_logprobs:
            self._output(sequence, [], None, prompt_logprobs=list(family.prompt_logprobs))
        return sequence

    def _enqueue(self, sequence: Sequence, now_ns: int) -> bool:
        """Puts a new sequence into the queue, unless it ends here: complete already, or impossible."""
        problem = sequence.problem(self.max_model_len)
        if problem is not None:
            self._fail(sequence, problem, now_ns)
            return False
        reason = sequence.verdict(self.max_model_len)
        if reason is not None:
            self._output(sequence, [], reason)
            self._retire(sequence, reason, now_ns)
            return False
        self.waiting.push(sequence)
        return True

    def _fail(self, sequence: Sequence, error: str, now_ns: int) -> None:
        self._output(sequence, [], FinishReason.ERROR, error=error)
        self._retire(sequence, FinishReason.ERROR, now_ns)

    def _retire(self, sequence: Sequence, reason: FinishReason, now_ns: int) -> None:
        """The one way out: takes the sequence from wherever it is and frees what it holds."""
        request, family = sequence.request, sequence.family
        if request.status is RequestStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in family.followers:
            family.followers.remove(sequence)
            self._num_followers -= 1
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        sequence.verified = False
        self.kv.free(request)
        self._record(
            EventKind.FINISHED, sequence, now_ns, request.num_output_tokens, request.num_prompt_tokens, reason.value
        )
        del family.members[request.choice]
        if not family.members:
            del self._families[request.request_id]
        elif family.leader is sequence and not family.prompt_done:
            self._lead(family, sequence.first_row, now_ns)

    # Small helpers

    def _output(
        self,
        sequence: Sequence,
        token_ids: list[int],
        reason: FinishReason | None,
        logprobs: list[TokenLogprob] | None = None,
        prompt_logprobs: list[TokenLogprob] | None = None,
        error: str | None = None,
    ) -> None:
        request = sequence.request
        cached = request.num_cached_tokens
        of = (request.request_id, request.choice)
        self._outputs.append(ChoiceOutput(*of, token_ids, reason, logprobs, prompt_logprobs, cached, error))

    def _record(
        self, kind: EventKind, sequence: Sequence, now_ns: int, num_tokens: int = 0, of: int = 0, detail: str = ""
    ) -> None:
        request = sequence.request
        self._recorder.record(
            kind, now_ns, request.request_id, request.choice, num_tokens=num_tokens, of=of, detail=detail
        )

    def check_integrity(self) -> None:
        """Linear check of all books, for idle moments and tests. Raises BlockPoolError or SchedulerError."""
        self.kv.check_integrity()
        members = [member for family in self._families.values() for member in family.members.values()]
        followers = sum(len(family.followers) for family in self._families.values())
        if len(members) != len(self.running) + len(self.waiting) + followers or followers != self._num_followers:
            raise SchedulerError("a live sequence is in no place or in two places")
        if any(sequence.request.status is not RequestStatus.RUNNING for sequence in self.running):
            raise SchedulerError("a running sequence has another status")
        if not members and self.kv.num_used_blocks:
            raise SchedulerError(f"{self.kv.num_used_blocks} KV blocks are held and no request is here")
