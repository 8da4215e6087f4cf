"""What a caller asks of `AsyncEngine` and what comes back: plain values, no wire format, no HTTP."""

from dataclasses import dataclass, field

from headrace.core.request import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One user request: a tokenised prompt and how to continue it, `n` times.

    `params.seed` is the user's, or one drawn with `AsyncEngine.choose_seed()` when the user gave none.
    `params` starts from `AsyncEngine.default_params`, which holds the model's sampling defaults and end-of-turn ids.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()  # stop strings, matched on text
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token with its logprob. `data` is the exact bytes it stands for; half a character when it is one."""

    token_id: int
    text: str
    data: bytes
    logprob: float
    top: tuple["TokenInfo", ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained. Text never holds half a character or part of a stop string."""

    choice: int
    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_output_tokens: int  # so far, counting what this delta adds
    num_cached_tokens: int = 0
    logprobs: list[TokenInfo] | None = None
    prompt_logprobs: list[TokenInfo] | None = None  # once, before or with the first token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """`state`: loading, ready, restarting, draining or dead."""

    state: str
    phase: str = ""  # what loading is doing
    fraction: float = 0.0
    error: str = ""
    details: dict[str, str] = field(default_factory=dict)
