"""What the scheduler hands up after a step, as plain values: tokens per choice, events, gauges."""

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.core.events import Event
from headrace.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), most likely first


class ChoiceOutput(NamedTuple):
    """What one choice gained in one step."""

    request_id: str
    choice: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None  # parallel to token_ids
    prompt_logprobs: list[TokenLogprob] | None = None  # the next prompt positions in order; the first is prompt token 1
    num_cached_tokens: int = 0
    error: str | None = None  # with finish_reason ERROR


@dataclass(frozen=True, slots=True)
class Gauges:
    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int


@dataclass(frozen=True, slots=True)
class StepOutputs:
    outputs: list[ChoiceOutput] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
