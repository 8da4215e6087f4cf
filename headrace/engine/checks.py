"""The last word on what may reach an engine, whichever surface it came through: HTTP or the in-process `LLM`.

The core trusts what passes here. Surfaces check their own fields earlier and in their own words; this is where a value
that they let through is still refused, so that a second surface cannot open a hole that the first one closed.
"""

import math

from headrace.base.errors import ContextLengthError, RequestError
from headrace.core.limits import LIMITS
from headrace.core.request import SamplingParams
from headrace.engine.generation import GenerationRequest

_MAX_SEED = (1 << 64) - 1


def check_generation(request: GenerationRequest, max_model_len: int, vocab_size: int) -> None:
    """Raises RequestError naming the parameter, or ContextLengthError with both numbers."""
    prompt = request.prompt_token_ids
    if not all(type(token_id) is int for token_id in prompt):
        raise RequestError("a prompt is a text or a list of token ids, which are whole numbers", param="prompt")
    if not prompt:
        raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        bad = next(token_id for token_id in prompt if not 0 <= token_id < vocab_size)
        raise RequestError(f"token id {bad} is outside the model's vocabulary of {vocab_size}", param="prompt")
    _whole("n", request.n, 1, LIMITS.max_n)
    _within("stop", len(request.stop), 0, LIMITS.max_stop)
    if any(not isinstance(stop, str) or not 0 < len(stop) <= LIMITS.max_stop_length for stop in request.stop):
        raise RequestError(f"a stop string has 1 to {LIMITS.max_stop_length} characters", param="stop")
    check_params(request.params, vocab_size)
    _check_context(len(prompt), request.params.max_tokens, max_model_len)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError naming the parameter."""
    _whole("max_tokens", params.max_tokens, 0)
    _whole("min_tokens", params.min_tokens, 0, params.max_tokens)
    _within("temperature", params.temperature, 0, LIMITS.max_temperature)
    _whole("top_k", params.top_k, 0, LIMITS.max_count)
    _within("min_p", params.min_p, 0, 1)
    _within("top_p", params.top_p, 0, 1)
    if params.top_p == 0:
        raise RequestError("top_p must be above 0", param="top_p")
    _within(
        "repetition_penalty",
        params.repetition_penalty,
        LIMITS.min_repetition_penalty,
        LIMITS.max_repetition_penalty,
    )
    _within("presence_penalty", params.presence_penalty, -2, 2)
    _within("frequency_penalty", params.frequency_penalty, -2, 2)
    _whole("seed", params.seed, 0, _MAX_SEED)
    _within("logit_bias", len(params.logit_bias), 0, LIMITS.max_logit_bias)
    _pairs("logit_bias", params.logit_bias)
    for token_id, bias in params.logit_bias:
        _whole("logit_bias", token_id, 0, vocab_size - 1)
        _within("logit_bias", bias, -LIMITS.max_logit_bias_value, LIMITS.max_logit_bias_value)
    for token_id in params.stop_token_ids:
        _whole("stop_token_ids", token_id, 0, vocab_size - 1)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None:
            _whole(name, count, 0, LIMITS.max_logprobs)


def _pairs(name: str, value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(item, tuple) and len(item) == 2 for item in value):
        raise RequestError(f"{name} is {value!r}, allowed: a tuple of pairs (token id, bias)", param=name)


def _whole(name: str, value: int, low: float, high: float = math.inf) -> None:
    if type(value) is not int:
        raise RequestError(f"{name} is {value!r}, allowed: a whole number", param=name)
    _within(name, value, low, high)


def _within(name: str, value: float, low: float, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} is {value!r}, allowed: a number", param=name)
    if not low <= value <= high or not math.isfinite(value):
        allowed = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
        raise RequestError(f"{name} is {value}, allowed: {allowed}", param=name)


def _check_context(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """Nothing is ever cut to fit. A prompt that is only scored (max_tokens 0) may fill the context."""
    total = num_prompt_tokens + max_tokens
    if total > max_model_len:
        raise ContextLengthError(
            f"the context holds {max_model_len} tokens, but {total} are asked for: {num_prompt_tokens} in the prompt "
            f"and {max_tokens} to generate",
            param="prompt" if num_prompt_tokens >= max_model_len else "max_tokens",
            code="context_length_exceeded",
        )
