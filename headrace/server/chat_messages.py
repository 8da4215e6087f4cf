"""Chat messages as clients send them, and the plain dictionaries that chat templates read."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.base.errors import RequestError
from headrace.core.limits import LIMITS
from headrace.server.fields import check_refused, honoured, ignored, refused


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Annotated[str, honoured("`text`; other kinds of part are not yet supported.")]
    text: Annotated[str | None, honoured("Text of a `text` part.")] = None
    refusal: Annotated[str | None, honoured("Text of a `refusal` part.")] = None
    image_url: Annotated[Any, refused("images.")] = None
    input_audio: Annotated[Any, refused("audio.")] = None
    video_url: Annotated[Any, refused("video.")] = None
    file: Annotated[Any, refused("files.")] = None


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, honoured("Given to the template.")]
    arguments: Annotated[str, honoured("A JSON object as text; the template gets the object.")] = "{}"


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: Annotated[CalledFunction, honoured("Given to the template.")]
    id: Annotated[str | None, honoured("Given to the template.")] = None
    type: Annotated[Literal["function"], honoured("Only functions.")] = "function"
    index: Annotated[int | None, ignored("the order of the list counts.")] = None


Role = Literal["system", "developer", "user", "assistant", "tool"]


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Annotated[Role, honoured("`developer` is given to the template as `system`.")]
    content: Annotated[
        str | list[ContentPart] | None,
        honoured("Text, or text parts (joined by newlines unless the template reads parts), or null."),
    ] = None
    name: Annotated[str | None, honoured("Given to the template.")] = None
    tool_calls: Annotated[list[ToolCall] | None, honoured("Calls of an earlier turn, given to the template.")] = None
    tool_call_id: Annotated[str | None, honoured("Given to the template.")] = None
    reasoning_content: Annotated[str | None, honoured("Given to the template. (Extension.)")] = None
    refusal: Annotated[str | None, ignored("a replayed answer may carry it; `content` is what counts.")] = None
    annotations: Annotated[Any, ignored("a replayed answer may carry them.")] = None
    audio: Annotated[Any, refused("audio.")] = None
    function_call: Annotated[Any, refused("the old form of tool calls.")] = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=LIMITS.max_messages)]


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """What the chat template gets. Raises RequestError naming the message and the part at fault."""
    return [_template_message(message, f"messages[{i}].") for i, message in enumerate(messages)]


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    check_refused(message, where)
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": message.content}
    if isinstance(message.content, list):
        result["content"] = [_part(part, f"{where}content[{i}]") for i, part in enumerate(message.content)]
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    result.update({key: value for key, value in optional.items() if value is not None})
    if message.tool_calls:
        result["tool_calls"] = [_call(call, f"{where}tool_calls[{i}].") for i, call in enumerate(message.tool_calls)]
    return result


def _part(part: ContentPart, where: str) -> dict[str, str]:
    check_refused(part, f"{where}.")
    if part.type not in ("text", "refusal"):
        message = f"{where}: parts of type {part.type[:40]!r} are not yet supported, only text"
        raise RequestError(message, param=f"{where}.type", code="unsupported_parameter")
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        message = f"{where}: a {part.type} part needs the field {part.type}"
        raise RequestError(message, param=f"{where}.{part.type}", code="missing_required_parameter")
    return {"type": "text", "text": text}


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    arguments = call.function.arguments or "{}"
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        param = f"{where}function.arguments"
        raise RequestError(f"{param}: not a JSON object", param=param, code="invalid_value") from error
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
