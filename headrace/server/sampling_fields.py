"""The sampling fields that chat and plain completions share, and their translation into `SamplingParams`."""

from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.base.errors import RequestError
from headrace.core.limits import LIMITS
from headrace.core.request import SamplingParams
from headrace.server.fields import honoured, ignored, refused
from headrace.server.service import Service

_MAX_SEED = (1 << 63) - 1
_MAX_COUNT = LIMITS.max_count

Count = Annotated[int, Meta(ge=0, le=_MAX_COUNT)]
PositiveCount = Annotated[int, Meta(ge=1, le=_MAX_COUNT)]
TokenId = Annotated[int, Meta(ge=0, le=_MAX_COUNT)]
Temperature = Annotated[float, Meta(ge=0, le=LIMITS.max_temperature)]
Probability = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=_MAX_COUNT)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(ge=LIMITS.min_repetition_penalty, le=LIMITS.max_repetition_penalty)]
Seed = Annotated[int, Meta(ge=0, le=_MAX_SEED)]
NumChoices = Annotated[int, Meta(ge=1, le=LIMITS.max_n)]
NumLogprobs = Annotated[int, Meta(ge=0, le=LIMITS.max_logprobs)]
StopString = Annotated[str, Meta(min_length=1, max_length=LIMITS.max_stop_length)]
StopStrings = Annotated[list[StopString], Meta(max_length=LIMITS.max_stop)]
StopIds = Annotated[list[TokenId], Meta(max_length=LIMITS.max_stop_token_ids)]
Bias = Annotated[float, Meta(ge=-LIMITS.max_logit_bias_value, le=LIMITS.max_logit_bias_value)]
Biases = Annotated[dict[TokenId, Bias], Meta(max_length=LIMITS.max_logit_bias)]
Label = Annotated[str, Meta(max_length=LIMITS.max_user_length)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: Annotated[
        bool | None, honoured("One more chunk before the end, with empty `choices` and the usage.")
    ] = None
    include_obfuscation: Annotated[bool | None, ignored("chunks are never padded.")] = None


class SamplingFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every generating surface takes. Absent and null mean the model's own default (generation_config.json)."""

    model: Annotated[str | None, honoured("Must be the served model's name; absent means that model.")] = None
    temperature: Annotated[Temperature | None, honoured("0 is greedy.")] = None
    top_p: Annotated[TopP | None, honoured("Keeps the likeliest tokens that hold this much probability.")] = None
    top_k: Annotated[TopK | None, honoured("Keeps the k likeliest tokens; 0 and -1 are off. (Extension.)")] = None
    min_p: Annotated[
        Probability | None, honoured("Keeps tokens at least this likely relative to the likeliest. (Extension.)")
    ] = None
    n: Annotated[NumChoices | None, honoured("How many answers; they share the prompt's work.")] = None
    stop: Annotated[
        StopString | StopStrings | None,
        honoured(f"Up to {LIMITS.max_stop} texts that end an answer; they are not part of it."),
    ] = None
    seed: Annotated[
        Seed | None,
        honoured("The same seed gives the same answer, alone or in any batch; choice i of n draws from (seed, i)."),
    ] = None
    presence_penalty: Annotated[Penalty | None, honoured("Lowers tokens that the answer already has.")] = None
    frequency_penalty: Annotated[Penalty | None, honoured("Lowers them by how often it has them.")] = None
    repetition_penalty: Annotated[
        Repetition | None, honoured("Divides logits of tokens in prompt and answer; 1 is off. (Extension.)")
    ] = None
    logit_bias: Annotated[Biases | None, honoured("Token id to a bias in -100..100; -100 forbids in practice.")] = None
    stream: Annotated[bool | None, honoured("Server-sent events instead of one answer.")] = None
    stream_options: Annotated[StreamOptions | None, honoured("Only with `stream`.")] = None
    ignore_eos: Annotated[bool | None, honoured("Goes on past the model's end of turn. (Extension.)")] = None
    min_tokens: Annotated[
        Count | None, honoured("No end of turn and no stop token id before this many tokens. (Extension.)")
    ] = None
    stop_token_ids: Annotated[StopIds | None, honoured("Further token ids that end an answer. (Extension.)")] = None
    include_stop_str_in_output: Annotated[
        bool | None, honoured("Leaves the stop string in the answer. (Extension.)")
    ] = None
    skip_special_tokens: Annotated[
        bool | None, honoured("Leaves control tokens out of the text; true by default. (Extension.)")
    ] = None
    cache_salt: Annotated[
        Label | None, honoured("Only requests with the same salt share cached prefixes. (Extension.)")
    ] = None
    user: Annotated[Any, ignored("kept nowhere; the API key is the tenant.")] = None
    structured_outputs: Annotated[Any, refused("constrained output.")] = None
    guided_json: Annotated[Any, refused("constrained output.")] = None
    guided_regex: Annotated[Any, refused("constrained output.")] = None
    guided_choice: Annotated[Any, refused("constrained output.")] = None
    guided_grammar: Annotated[Any, refused("constrained output.")] = None
    priority: Annotated[Any, refused("request priorities.", 0)] = None
    truncate_prompt_tokens: Annotated[Any, refused("a prompt is never cut.")] = None


def check_options(fields: SamplingFields) -> None:
    """Rules between fields. Raises RequestError."""
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options", code="invalid_value")


def stop_strings(fields: SamplingFields) -> tuple[str, ...]:
    if fields.stop is None:
        return ()
    return (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)


def sampling_params(
    service: Service, fields: SamplingFields, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    """The model's defaults with the request's own values over them. Raises RequestError for a bad token id."""
    defaults = service.engine.default_params()
    bias = fields.logit_bias or {}
    service.check_token_ids(fields.stop_token_ids or [], "stop_token_ids")
    stop_ids = () if fields.ignore_eos else defaults.stop_token_ids
    given = {
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": None if fields.top_k is None else max(0, fields.top_k),
        "min_p": fields.min_p,
        "repetition_penalty": fields.repetition_penalty,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "min_tokens": fields.min_tokens,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(
        defaults,
        **changes,
        max_tokens=max_tokens,
        logit_bias=tuple(bias.items()),
        seed=service.engine.choose_seed() if fields.seed is None else fields.seed,
        stop_token_ids=tuple(dict.fromkeys((*stop_ids, *(fields.stop_token_ids or ())))),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
