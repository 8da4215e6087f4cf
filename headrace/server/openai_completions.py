"""POST /v1/completions: plain continuation of text or token ids, with OpenAI's older logprob shape.

Evaluation harnesses live here: `echo` with `logprobs` scores a prompt, and with `max_tokens` 0 does nothing else.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.base.errors import RequestError
from headrace.core.limits import LIMITS
from headrace.core.request import FinishReason
from headrace.engine.generation import Delta, GenerationRequest, TokenInfo
from headrace.server.answers import Answer, Counter, Indexed, Usage, collect, start, while_connected
from headrace.server.context import read_body
from headrace.server.errors import json_response
from headrace.server.fields import decode, honoured, ignored, refused
from headrace.server.legacy_logprobs import CompletionLogprobs, LegacyLogprobs
from headrace.server.sampling_fields import (
    Count,
    NumChoices,
    NumLogprobs,
    SamplingFields,
    TokenId,
    check_options,
    sampling_params,
    stop_strings,
)
from headrace.server.service import Service, new_id
from headrace.server.sse import EventStream, frame

_DEFAULT_MAX_TOKENS = 16

PromptIds = Annotated[list[TokenId], Meta(max_length=LIMITS.max_prompt_tokens)]
Prompts = Annotated[list[str | TokenId | PromptIds], Meta(min_length=1, max_length=LIMITS.max_prompt_tokens)]


class CompletionRequest(SamplingFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt: Annotated[
        str | Prompts, honoured("A text, token ids, or a list of up to 128 of either; answers come in prompt order.")
    ]
    max_tokens: Annotated[Count | None, honoured("16 when absent; 0 only with `echo`.")] = None
    logprobs: Annotated[
        NumLogprobs | None, honoured("Logprobs of the tokens and of so many likeliest ones, at most 20.")
    ] = None
    echo: Annotated[
        bool | None, honoured("Puts the prompt before the answer; with `logprobs` the prompt is scored too.")
    ] = None
    best_of: Annotated[NumChoices | None, honoured("Only equal to `n`: there is no choosing among more.")] = None
    add_special_tokens: Annotated[
        bool | None, honoured("Lets the tokeniser frame a text prompt; true by default. (Extension.)")
    ] = None
    suffix: Annotated[Any, refused("insertion before a given end.", "")] = None
    response_format: Annotated[Any, refused("constrained output.", {"type": "text"})] = None
    metadata: Annotated[Any, ignored("nothing is stored.")] = None


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None  # extension: the stop string or stop token id that ended the answer


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str | None  # None when ids were given
    token_ids: list[int]


async def create(service: Service, request: Request) -> ASGIApp:
    service.require_ready()
    body = decode(CompletionRequest, await read_body(request, service.body_timeout))
    service.check_model(body.model)
    check_options(body)
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise RequestError("best_of must equal n: it is not supported", param="best_of", code="unsupported_parameter")
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens 0 asks for nothing without echo", param="max_tokens", code="invalid_value")
    prompts = await while_connected(request.receive, _prompts(service, body, n))
    salt = request.scope.get("state", {}).get("cache_salt", "")
    completion_id = new_id("cmpl")
    requests = [_generation(service, body, p, f"{completion_id}-{i}", salt) for i, p in enumerate(prompts)]
    counter = Counter([len(prompt.token_ids) for prompt in prompts], n)
    writer = _Writer(service, body, completion_id, prompts)
    deltas = await start(service, requests)
    if body.stream:
        return EventStream(writer.frames(deltas, counter), service.keep_alive_interval)
    answers = await while_connected(request.receive, collect(deltas, counter, n * len(prompts)))
    return json_response(writer.whole(answers, counter.usage()))


async def _prompts(service: Service, body: CompletionRequest, n: int) -> list[_Prompt]:
    """Every prompt with its token ids. Raises RequestError for a list of mixed kinds or of too many."""
    given = body.prompt
    parts: Sequence[str | int | list[int]] = [given] if isinstance(given, str) else given
    if isinstance(parts[0], int):
        parts = [_only_ids(parts)]
    if len(parts) > LIMITS.max_prompts or len(parts) * n > LIMITS.max_sequences:
        message = (
            f"{len(parts)} prompts with {n} answers each: at most {LIMITS.max_prompts} prompts and "
            f"{LIMITS.max_sequences} answers fit in one request"
        )
        raise RequestError(message, param="prompt", code="invalid_value")
    result = []
    for i, part in enumerate(parts):
        if type(part) is not type(parts[0]):
            raise _mixed(i)
        if isinstance(part, str):
            ids = await service.engine.encode(part, add_special_tokens=body.add_special_tokens is not False)
            result.append(_Prompt(part, ids))
        else:
            result.append(_Prompt(None, list(part) if isinstance(part, list) else []))
    return result


def _only_ids(parts: Sequence[str | int | list[int]]) -> list[int]:
    for i, part in enumerate(parts):
        if not isinstance(part, int):
            raise _mixed(i)
    return [part for part in parts if isinstance(part, int)]


def _mixed(index: int) -> RequestError:
    message = f"prompt[{index}] is of another kind than prompt[0]: a list holds texts, or token ids, or lists of them"
    return RequestError(message, param="prompt", code="invalid_value")


def _generation(
    service: Service, body: CompletionRequest, prompt: _Prompt, request_id: str, tenant_salt: str
) -> GenerationRequest:
    max_tokens = service.output_budget(len(prompt.token_ids), body.max_tokens, _DEFAULT_MAX_TOKENS)
    prompt_logprobs = body.logprobs if body.echo else None
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        params=sampling_params(service, body, max_tokens, body.logprobs, prompt_logprobs),
        n=body.n or 1,
        stop=stop_strings(body),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        cache_salt=tenant_salt + (body.cache_salt or ""),
    )


class _Writer:
    """The answers of one request, whole or in chunks."""

    def __init__(self, service: Service, body: CompletionRequest, completion_id: str, prompts: list[_Prompt]) -> None:
        self._service = service
        self._id = completion_id
        self._created = int(time.time())
        self._prompts = prompts
        self._n = body.n or 1
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        tokenizer = service.engine.tokenizer
        self._shapers = [
            LegacyLogprobs(tokenizer, self._text_start(prompt)) for prompt in prompts for _ in range(self._n)
        ]
        self._silent = [True] * len(self._shapers)  # choices whose prompt has not been echoed yet

    def whole(self, answers: list[Answer], usage: Usage) -> Completion:
        choices = []
        for index, answer in enumerate(answers):
            text, logprobs = "".join(answer.text), None
            if self._logprobs is not None:
                logprobs = self._shape(index, self._echoed(index, answer.prompt_logprobs), answer.logprobs)
            text = self._prompt_text(self._prompts[index // self._n]) + text if self._echo else text
            choices.append(CompletionChoice(index, text, logprobs, answer.finish_reason, answer.stop_reason))
        return self._completion(choices, usage)

    async def frames(self, deltas: AsyncGenerator[Indexed, None], counter: Counter) -> AsyncGenerator[bytes, None]:
        async with aclosing(deltas):
            async for index, delta in deltas:
                counter.add(index, delta)
                choice = self._chunk(index, delta)
                if choice is not None:
                    yield frame(self._completion([choice], None if self._usage else UNSET))
        if self._usage:
            yield frame(self._completion([], counter.usage()))

    def _chunk(self, index: int, delta: Delta) -> CompletionChoice | None:
        first, self._silent[index] = self._silent[index], False
        text, logprobs = delta.text, None
        prompt = self._echoed(index, delta.prompt_logprobs or []) if first else []
        if self._logprobs is not None and (delta.logprobs or prompt):
            logprobs = self._shape(index, prompt, delta.logprobs or [])
        if first and self._echo:
            text = self._prompt_text(self._prompts[index // self._n]) + text
        if not (text or logprobs or delta.finish_reason):
            return None
        return CompletionChoice(index, text, logprobs, delta.finish_reason, delta.stop_reason)

    def _prompt_text(self, prompt: _Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._service.engine.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def _text_start(self, prompt: _Prompt) -> int:
        """Where the echoed prompt's tokens begin: before 0 when a begin token or a leading space is not in its text."""
        if not self._echo or self._logprobs is None:
            return 0
        tokenizer = self._service.engine.tokenizer
        data = b"".join(tokenizer.token_bytes(token_id) for token_id in prompt.token_ids)
        return len(self._prompt_text(prompt)) - len(data.decode("utf-8", "replace"))

    def _echoed(self, index: int, scored: list[TokenInfo]) -> list[TokenInfo | int]:
        """The prompt's tokens, the first as a bare id: nothing comes before it, so it has no logprob."""
        if not self._echo:
            return []
        return [self._prompts[index // self._n].token_ids[0], *scored]

    def _shape(self, index: int, prompt: list[TokenInfo | int], output: list[TokenInfo]) -> CompletionLogprobs:
        return self._shapers[index].shape([*prompt, *output])

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        model = self._service.model_name
        return Completion(id=self._id, created=self._created, model=model, choices=choices, usage=usage)
