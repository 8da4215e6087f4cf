"""Sequence: a Request inside the scheduler, and Family: the choices of one user request, which share its prompt."""

from collections import deque
from dataclasses import dataclass, field

from headrace.core.outputs import TokenLogprob
from headrace.core.penalties import PenaltyHistory, uses_penalties
from headrace.core.policy import Place
from headrace.core.request import FinishReason, Request

NO_ROW = 1 << 62


@dataclass(slots=True, eq=False)
class Family:
    """`leader` computes the prompt; `followers` wait for it outside the queue and then share its KV blocks."""

    members: dict[int, "Sequence"] = field(default_factory=dict)  # live ones, by choice
    followers: deque["Sequence"] = field(default_factory=deque)
    leader: "Sequence | None" = None
    prompt_done: bool = False
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # so far, for the followers


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    place: Place
    family: Family
    first_row: int = NO_ROW  # first prompt position whose logprob row is still owed; beyond the prompt: none
    verified: bool = False  # its KV gave a finite row since it was last admitted
    history: PenaltyHistory | None = None
    stop_ids: frozenset[int] = field(init=False)
    samples: bool = field(init=False)  # False for max_tokens = 0

    def __post_init__(self) -> None:
        self.stop_ids = frozenset(self.request.params.stop_token_ids)
        self.samples = self.request.params.max_tokens > 0

    def prepare(self) -> None:
        """Makes what only a running sequence needs."""
        if self.history is None and uses_penalties(self.request.params):
            self.history = PenaltyHistory(self.request)

    @property
    def owes_prompt_rows(self) -> bool:
        return self.first_row < self.request.num_prompt_tokens - 1

    @property
    def goal(self) -> int:
        """How many tokens must have KV for its next result: all known ones; without sampling, all but the last."""
        return self.request.num_tokens if self.samples else self.request.num_prompt_tokens - 1

    @property
    def reusable(self) -> int:
        """The most tokens that may come from the prefix cache: the next row that is owed must be computed."""
        return min(self.goal - 1, self.first_row)

    def wanted(self, tokens: int, rows: int) -> int:
        """Tokens to compute next, given what is left of the step's token budget and output rows (at least 1 each)."""
        request = self.request
        computed = request.num_computed_tokens
        want = self.goal - computed
        if want > tokens:
            want = tokens
        if self.first_row < NO_ROW and self.owes_prompt_rows:
            want = min(want, max(0, self.first_row - computed) + rows)
        return want

    def verdict(self, max_model_len: int) -> FinishReason | None:
        """Why it needs no further token, or None."""
        request = self.request
        output = request.output_token_ids
        count = len(output)
        if count and output[-1] in self.stop_ids:
            return FinishReason.STOP
        if count >= request.params.max_tokens and not self.owes_prompt_rows:
            return FinishReason.LENGTH
        full = count and count + len(request.prompt_token_ids) >= max_model_len
        return FinishReason.LENGTH if full else None

    def problem(self, max_model_len: int) -> str | None:
        """Why it can never run, or None."""
        num_prompt = self.request.num_prompt_tokens
        if num_prompt == 0:
            return "the prompt is empty: at least one token is needed"
        if num_prompt + self.samples > max_model_len:
            held = f"this engine holds at most {max_model_len} tokens of prompt and output per request"
            return f"the prompt has {num_prompt} tokens, which leaves no room for output: {held}"
        return None
