"""What crosses the process boundary between `engine.client` and `engine.process`: msgspec structs as msgpack.

Down: ToEngine. Up: FromEngine. One upward message per step, with its events. Nothing is ever pickled.
"""

import msgspec

from headrace.core.events import Event


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """core.request.SamplingParams on the wire, field by field."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: list[tuple[int, float]]
    seed: int
    stop_token_ids: list[int]
    logprobs: int | None
    prompt_logprobs: int | None


class Add(msgspec.Struct, frozen=True, tag=True):
    """A new or resubmitted request: `outputs` holds, per choice, the tokens already produced before a crash."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    arrival_ns: int
    n: int = 1
    outputs: list[list[int]] = []
    done_choices: list[int] = []  # choices that had already finished
    cache_salt: str = ""


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The client found a stop string: `num_tokens` output tokens of this choice count; what follows is waste."""

    request_id: str
    choice: int
    reason: str
    num_tokens: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


ToEngine = Add | Abort | Finish | Shutdown


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Output(msgspec.Struct, frozen=True, array_like=True):
    """What one choice gained in one step."""

    request_id: str
    choice: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None  # parallel to token_ids
    prompt_logprobs: list[TokenLogprob] | None = None  # the next prompt positions; the first is prompt token 1
    num_cached_tokens: int = 0
    error: str | None = None  # set with finish_reason "error"


class Gauges(msgspec.Struct, frozen=True, array_like=True):
    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int


class Loading(msgspec.Struct, frozen=True, tag=True):
    phase: str
    fraction: float  # 0..1


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine can serve. `summary` is what the server prints: what was chosen and why (label -> text)."""

    max_model_len: int
    max_num_seqs: int
    num_kv_tokens: int
    block_size: int
    vocab_size: int
    summary: dict[str, str]
    num_blocks: int = 0  # KV blocks of all groups
    kv_dtype: str = "bf16"
    kv_bytes: int = 0


class Step(msgspec.Struct, frozen=True, tag=True):
    step_id: int
    outputs: list[Output]
    events: list[Event]
    gauges: Gauges
    step_ns: int


class SelfTest(msgspec.Struct, frozen=True, tag=True):
    """Measured once on idle time after readiness."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; the process exits after this."""

    error: str
    kind: str


FromEngine = Loading | Ready | Step | SelfTest | Failed
