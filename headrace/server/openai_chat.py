"""POST /v1/chat/completions: OpenAI's chat completions.

Parses the body into `ChatRequest`, lets the engine render and tokenise the conversation, and writes answers whole or as
server-sent events. The role comes with the first token, never before it, so that a client's time to first chunk is the
time to first token.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.base.errors import RequestError
from headrace.core.request import FinishReason
from headrace.engine.generation import Delta, GenerationRequest, TokenInfo
from headrace.server.answers import Answer, Counter, Indexed, Usage, collect, finite, start, while_connected
from headrace.server.chat_messages import Messages, template_messages
from headrace.server.context import read_body
from headrace.server.errors import json_response
from headrace.server.fields import decode, honoured, ignored, refused
from headrace.server.sampling_fields import (
    NumLogprobs,
    PositiveCount,
    SamplingFields,
    check_options,
    sampling_params,
    stop_strings,
)
from headrace.server.service import Service, new_id
from headrace.server.sse import EventStream, frame

# What a template takes from the server itself: a client that set these would change how its prompt is put together.
_RESERVED_KWARGS = ("messages", "tools", "tokenize", "chat_template", "add_generation_prompt", "continue_final_message")


class ChatRequest(SamplingFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[Messages, honoured("The conversation; at least one message.")]
    add_generation_prompt: Annotated[
        bool | None, honoured("Ends the prompt where the assistant begins to speak; true by default. (Extension.)")
    ] = None
    continue_final_message: Annotated[
        bool | None, honoured("Goes on with the last message instead of answering it. (Extension.)")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, honoured("Further variables for the template, such as enable_thinking. (Extension.)")
    ] = None
    max_completion_tokens: Annotated[
        PositiveCount | None, honoured("Most tokens of the answer; absent: what the context holds.")
    ] = None
    max_tokens: Annotated[PositiveCount | None, honoured("The older name of max_completion_tokens.")] = None
    logprobs: Annotated[bool | None, honoured("Returns the logprob of each token.")] = None
    top_logprobs: Annotated[
        NumLogprobs | None, honoured("And of so many likeliest tokens, at most 20; needs `logprobs`.")
    ] = None
    metadata: Annotated[Any, ignored("nothing is stored.")] = None
    store: Annotated[Any, ignored("nothing is stored.")] = None
    safety_identifier: Annotated[Any, ignored("kept nowhere.")] = None
    prompt_cache_key: Annotated[Any, ignored("prefixes are matched by content.")] = None
    prompt_cache_retention: Annotated[Any, ignored("prefixes are kept by use.")] = None
    parallel_tool_calls: Annotated[Any, ignored("there are no tool calls to run side by side.")] = None
    tools: Annotated[Any, refused("tool calls.", [])] = None
    tool_choice: Annotated[Any, refused("tool calls.", "none", "auto")] = None
    functions: Annotated[Any, refused("the old form of tools.", [])] = None
    function_call: Annotated[Any, refused("the old form of tool_choice.", "none", "auto")] = None
    response_format: Annotated[Any, refused("constrained output.", {"type": "text"})] = None
    reasoning_effort: Annotated[Any, refused("reasoning budgets.", "none")] = None
    verbosity: Annotated[Any, refused("output length hints.", "medium")] = None
    modalities: Annotated[Any, refused("other outputs than text.", ["text"])] = None
    audio: Annotated[Any, refused("audio.")] = None
    prediction: Annotated[Any, refused("predicted outputs.")] = None
    web_search_options: Annotated[Any, refused("web search.")] = None
    service_tier: Annotated[Any, refused("service classes.", "auto", "default")] = None
    chat_template: Annotated[Any, refused("a client's own template; the server's --chat-template sets it.")] = None
    documents: Annotated[Any, refused("retrieval documents.", [])] = None


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None  # extension: the stop string or stop token id that ended the answer


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChunkDelta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChunkDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


async def create(service: Service, request: Request) -> ASGIApp:
    service.require_ready()
    body = decode(ChatRequest, await read_body(request, service.body_timeout))
    service.check_model(body.model)
    check_options(body)
    salt = request.scope.get("state", {}).get("cache_salt", "")
    generation = await while_connected(request.receive, _generation(service, body, salt))
    counter = Counter([len(generation.prompt_token_ids)], generation.n)
    deltas = await start(service, [generation])
    if body.stream:
        chunks = _ChatChunks(service, body, generation)
        return EventStream(chunks.frames(deltas, counter), service.keep_alive_interval)
    answers = await while_connected(request.receive, collect(deltas, counter, generation.n))
    choices = [_choice(i, answer, bool(body.logprobs)) for i, answer in enumerate(answers)]
    return json_response(
        ChatCompletion(
            id=generation.request_id,
            created=int(time.time()),
            model=service.model_name,
            choices=choices,
            usage=counter.usage(),
        )
    )


def template_options(
    add_generation_prompt: bool | None, continue_final_message: bool | None, kwargs: dict[str, Any] | None
) -> dict[str, Any]:
    """What `encode_chat` takes beside the messages. Raises RequestError for options that contradict each other."""
    for name in _RESERVED_KWARGS:
        if kwargs and name in kwargs:
            param = f"chat_template_kwargs.{name}"
            raise RequestError(f"{param} is set by the server", param=param, code="invalid_value")
    goes_on = bool(continue_final_message)
    if goes_on and add_generation_prompt:
        message = "add_generation_prompt and continue_final_message cannot both be true"
        raise RequestError(message, param="continue_final_message", code="invalid_value")
    return {
        "add_generation_prompt": not goes_on if add_generation_prompt is None else add_generation_prompt,
        "continue_final_message": goes_on,
        "template_kwargs": kwargs or {},
    }


async def _generation(service: Service, body: ChatRequest, tenant_salt: str) -> GenerationRequest:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.max_tokens is not None and body.max_tokens != asked:
        message = "max_tokens and max_completion_tokens are the same limit, and differ"
        raise RequestError(message, param="max_tokens", code="invalid_value")
    options = template_options(body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs)
    prompt = await service.engine.encode_chat(template_messages(body.messages), **options)
    max_tokens = service.output_budget(len(prompt), asked, default=None)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return GenerationRequest(
        request_id=new_id("chatcmpl"),
        prompt_token_ids=prompt,
        params=sampling_params(service, body, max_tokens, logprobs),
        n=body.n or 1,
        stop=stop_strings(body),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        cache_salt=tenant_salt + (body.cache_salt or ""),
    )


def _choice(index: int, answer: Answer, logprobs: bool) -> ChatChoice:
    message = AnswerMessage("".join(answer.text))
    shown = chat_logprobs(answer.logprobs) if logprobs else None
    return ChatChoice(index, message, shown, answer.finish_reason or FinishReason.STOP, answer.stop_reason)


def chat_logprobs(tokens: Sequence[TokenInfo]) -> ChoiceLogprobs:
    return ChoiceLogprobs(
        [
            TokenLogprob(token.text, finite(token.logprob), list(token.data), [_top(top) for top in token.top])
            for token in tokens
        ]
    )


def _top(token: TokenInfo) -> TopLogprob:
    return TopLogprob(token.text, finite(token.logprob), list(token.data))


class _ChatChunks:
    """Turns the deltas of one request into encoded chunks."""

    def __init__(self, service: Service, body: ChatRequest, generation: GenerationRequest) -> None:
        self._id = generation.request_id
        self._created = int(time.time())
        self._model = service.model_name
        self._logprobs = bool(body.logprobs)
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._silent = [True] * generation.n  # choices that have not spoken yet

    async def frames(self, deltas: AsyncGenerator[Indexed, None], counter: Counter) -> AsyncGenerator[bytes, None]:
        async with aclosing(deltas):
            async for index, delta in deltas:
                counter.add(index, delta)
                choice = self._choice(index, delta)
                if choice is not None:
                    yield self._frame([choice], None if self._usage else UNSET)
        if self._usage:
            yield self._frame([], counter.usage())

    def _choice(self, index: int, delta: Delta) -> ChunkChoice | None:
        """None when there is nothing to say: half a character, or what may become a stop string, is held back."""
        first, self._silent[index] = self._silent[index], False
        logprobs = chat_logprobs(delta.logprobs) if self._logprobs and delta.logprobs else None
        if not (first or delta.text or logprobs or delta.finish_reason):
            return None
        said = ChunkDelta(role="assistant" if first else UNSET, content=delta.text if delta.text or first else UNSET)
        stop_reason = delta.stop_reason if delta.finish_reason else UNSET
        return ChunkChoice(index, said, logprobs, delta.finish_reason, stop_reason)

    def _frame(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> bytes:
        chunk = ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)
        return frame(chunk)
