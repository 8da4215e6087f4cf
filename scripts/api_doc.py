"""Writes the generated part of docs/api.md: the field tables, from the structs that decode the requests.

python scripts/api_doc.py           rewrites docs/api.md
python scripts/api_doc.py --check   fails when it is not current
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.server.chat_messages import ChatMessage, ContentPart, ToolCall
from headrace.server.fields import rules
from headrace.server.openai_chat import ChatRequest
from headrace.server.openai_completions import CompletionRequest
from headrace.server.sampling_fields import StreamOptions
from headrace.server.tokenize import DetokenizeRequest, TokenizeRequest

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
BEGIN = "<!-- begin generated: scripts/api_doc.py -->"
END = "<!-- end generated -->"

TABLES: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("POST /v1/chat/completions", ChatRequest),
    ("A chat message", ChatMessage),
    ("A content part of a message", ContentPart),
    ("A tool call of an earlier turn", ToolCall),
    ("POST /v1/completions", CompletionRequest),
    ("stream_options", StreamOptions),
    ("POST /tokenize", TokenizeRequest),
    ("POST /detokenize", DetokenizeRequest),
)


def tables() -> str:
    return "\n\n".join(f"### {title}\n\n{table(struct)}" for title, struct in TABLES)


def table(struct: type[msgspec.Struct]) -> str:
    _, components = msgspec.json.schema_components([struct], ref_template="{name}")
    schema = components[struct.__name__]
    required = set(schema.get("required", ()))
    lines = ["| field | value | support | |", "|---|---|---|---|"]
    for rule in rules(struct):
        value = _value(schema["properties"][rule.name])
        mark = " (required)" if rule.name in required else ""
        doc = rule.doc.removeprefix("Ignored: ").removeprefix("Not yet supported: ")
        if rule.support == "refused":
            value = " or ".join(f"`{msgspec.json.encode(neutral).decode()}`" for neutral in rule.accepts)
        doc = doc[0].upper() + doc[1:]
        lines.append(f"| `{rule.name}`{mark} | {value} | {rule.support} | {doc} |")
    return "\n".join(lines)


def _value(schema: dict[str, Any]) -> str:
    """A type and its range in a few words. Null is left out: it always means absent."""
    if "anyOf" in schema:
        return ", or ".join(_value(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "$ref" in schema:
        return str(schema["$ref"])
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    kind = schema.get("type", "anything")
    if kind in ("number", "integer"):
        return f"{kind}{_range(schema)}"
    if kind == "array":
        inner = _value(schema.get("items", {}))
        most = f" (at most {schema['maxItems']})" if "maxItems" in schema else ""
        return f"list of {inner}{most}"
    return "true or false" if kind == "boolean" else str(kind)


def _range(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    if low is None and above is None:
        return ""
    start = f" above {above:g} to" if above is not None else f" {low:g} to"
    if high is None or high >= (1 << 31) - 1:
        return f" from {low:g}" if above is None else f" above {above:g}"
    return f"{start} {high:g}"


def render(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
    page = PAGE.read_text()
    current = render(page)
    if list(arguments) == ["--check"]:
        if page != current:
            print("docs/api.md is not current: run python scripts/api_doc.py", file=sys.stderr)
        return int(page != current)
    PAGE.write_text(current)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
