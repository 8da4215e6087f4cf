"""POST /tokenize and /detokenize: exactly the ids that a completion or a chat would run on, in vLLM's shapes."""

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import RequestError
from headrace.core.limits import LIMITS
from headrace.server.answers import while_connected
from headrace.server.chat_messages import Messages, template_messages
from headrace.server.context import read_body
from headrace.server.errors import json_response
from headrace.server.fields import decode, honoured, refused
from headrace.server.openai_chat import template_options
from headrace.server.sampling_fields import TokenId
from headrace.server.service import Service


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: Annotated[str | None, honoured("Must be the served model's name; absent means that model.")] = None
    prompt: Annotated[str | None, honoured("A text; this or `messages`.")] = None
    messages: Annotated[Messages | None, honoured("A conversation, rendered as a chat completion would.")] = None
    add_special_tokens: Annotated[
        bool | None, honoured("Lets the tokeniser frame the text; true by default. A chat's template frames it itself.")
    ] = None
    add_generation_prompt: Annotated[bool | None, honoured("As in chat; only with `messages`.")] = None
    continue_final_message: Annotated[bool | None, honoured("As in chat; only with `messages`.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, honoured("As in chat; only with `messages`.")] = None
    return_token_strs: Annotated[bool | None, honoured("Returns the text of each token too.")] = None
    tools: Annotated[Any, refused("tool calls.", [])] = None


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: Annotated[str | None, honoured("Must be the served model's name; absent means that model.")] = None
    tokens: Annotated[
        Annotated[list[TokenId], Meta(max_length=LIMITS.max_prompt_tokens)],
        honoured("Token ids; control tokens show as their text."),
    ]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


async def tokenize(service: Service, request: Request) -> Response:
    service.require_ready()
    body = decode(TokenizeRequest, await read_body(request, service.body_timeout))
    service.check_model(body.model)
    token_ids = await while_connected(request.receive, _token_ids(service, body))
    tokenizer = service.engine.tokenizer
    texts = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
    return json_response(TokenizeResponse(len(token_ids), service.engine.max_model_len, token_ids, texts))


async def _token_ids(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either prompt or messages", param="prompt", code="invalid_value")
    if body.messages is not None:
        if body.add_special_tokens:
            message = "add_special_tokens goes with prompt: a chat's template frames the text itself"
            raise RequestError(message, param="add_special_tokens", code="invalid_value")
        options = template_options(body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs)
        return await service.engine.encode_chat(template_messages(body.messages), **options)
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise RequestError(f"{name} goes with messages", param=name, code="invalid_value")
    return await service.engine.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)


async def detokenize(service: Service, request: Request) -> Response:
    service.require_ready()
    body = decode(DetokenizeRequest, await read_body(request, service.body_timeout))
    service.check_model(body.model)
    service.check_token_ids(body.tokens, "tokens")
    tokenizer = service.engine.tokenizer
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(text))
