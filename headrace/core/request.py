"""What one generation is: its sampling parameters, status and counters.

A `Request` stores few counters and derives the rest. It knows no blocks, no tensors and no clock.
"""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(IntEnum):
    WAITING = 0
    WAITING_GRAMMAR = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED = 4


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Validated at the border (server or LLM); the core trusts it.

    Stop *strings* live in `text`: they are matched on text, in the client. `stop_token_ids` here holds every id that
    ends generation, the model's end-of-turn ids included; the matched stop token is counted and returned, not shown.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy, and so is anything below 1e-4
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # 64 bits, chosen at acceptance when the user gave none
    stop_token_ids: tuple[int, ...] = ()  # already empty of end-of-turn ids when ignore_eos
    logprobs: int | None = None  # None: off; 0: the chosen token only; k: and the k most likely
    prompt_logprobs: int | None = None  # the same, for each prompt token after the first


@dataclass(slots=True)
class Request:
    """One choice of one user request, as the scheduler sees it.

    `n` choices of a user request are `n` Requests that share `request_id` and differ in `choice`.
    Prompt and output are two fields, never merged: penalties, min_tokens, max_tokens and usage depend on the split.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_ns: int
    choice: int = 0
    output_token_ids: list[int] = field(default_factory=list)  # non-empty at arrival when resubmitted after a crash
    cache_salt: str = ""  # tenant salt of the prefix cache
    adapter_id: int = 0
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0  # KV present, cache hits included
    num_cached_tokens: int = 0  # of those, from the prefix cache at first admission
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.choice)

    def token_range(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt + output."""
        split = len(self.prompt_token_ids)
        if end <= split:
            return self.prompt_token_ids[start:end]
        if start >= split:
            return self.output_token_ids[start - split : end - split]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - split]
