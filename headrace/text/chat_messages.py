"""Messages as the API gives them, made into what chat templates expect.

Templates differ in one thing that matters: most take `content` as a string, some loop over its parts. Knows the
template only as text; renders nothing.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.base.errors import RequestError

_LOOPS_OVER_PARTS = re.compile(r"""\bfor\s+\w+\s+in\s+[\w.]+(\.content|\[['"]content['"]\])""")


def takes_parts(template: str) -> bool:
    """Whether the template loops over the parts of a message's content."""
    return _LOOPS_OVER_PARTS.search(template) is not None


def prepare_messages(messages: Sequence[Mapping[str, Any]], keep_parts: bool) -> list[dict[str, Any]]:
    """Copies with `content` never null, text parts joined by newlines unless `keep_parts`, and the arguments of tool
    calls parsed. Raises RequestError for a part that is not text."""
    prepared = []
    for i, message in enumerate(messages):
        copy = dict(message)
        content = copy.get("content")
        if content is None:
            copy["content"] = ""
        elif isinstance(content, Sequence) and not isinstance(content, str):
            texts = [_part_text(part, i) for part in content]
            copy["content"] = [{"type": "text", "text": text} for text in texts] if keep_parts else "\n".join(texts)
        if copy.get("tool_calls"):
            copy["tool_calls"] = [_parsed_call(call) for call in copy["tool_calls"]]
        prepared.append(copy)
    return prepared


def _part_text(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(
        f"this model reads text only; a content part of type {kind!r} cannot be used", param=f"messages.{index}.content"
    )


def _parsed_call(call: Any) -> Any:
    """Arguments travel as a JSON string, but templates write them with `tojson` and would quote them twice."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return {**call, "function": function}
