"""How a surface declares its fields, and the decoder that holds clients to the declaration.

A request body is a msgspec struct. Each field carries, beside its type and range, a `Meta` that says whether Headrace
honours it, ignores it (and why that is harmless) or refuses it (and which neutral values it lets pass). The decoder,
the OpenAPI schema and the conformity table in docs/api.md are all read from these declarations: no second list is kept.

Knows nothing of HTTP or of the engine. Every failure is a `RequestError` that names the field.
"""

import re
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Meta

from headrace.base.config import nearest
from headrace.base.errors import RequestError

S = TypeVar("S", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_AT = re.compile(r"^(?P<problem>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MAX_SHOWN = 80  # characters of a client's own words that an error repeats


@dataclass(frozen=True, slots=True)
class FieldRule:
    """One row of the conformity table."""

    name: str
    support: str  # "honoured", "ignored" or "refused"
    doc: str
    accepts: tuple[Any, ...] = ()  # of a refused field: the values that mean nothing is asked


def honoured(doc: str, **schema: Any) -> Meta:
    """A field that does what the API says. `schema` is further JSON schema."""
    return Meta(description=doc, extra={"support": "honoured"}, extra_json_schema=schema or None)


def ignored(doc: str) -> Meta:
    """A field that changes nothing here; `doc` says why that is safe."""
    return Meta(description=f"Ignored: {doc}", extra={"support": "ignored"})


def refused(doc: str, *accepts: Any) -> Meta:
    """A field that Headrace does not support yet: only null and `accepts`, which ask for nothing, pass."""
    values = (None, *accepts)
    return Meta(
        description=f"Not yet supported: {doc}",
        extra={"support": "refused", "accepts": values},
        extra_json_schema={"enum": list(values)},
    )


@cache
def rules(cls: type[msgspec.Struct]) -> tuple[FieldRule, ...]:
    """The declared fields of a struct, in order. Raises TypeError for a field that declares no support."""
    result = []
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        metas = [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Meta) and meta.extra]
        if not metas:
            raise TypeError(f"{cls.__name__}.{name} does not say whether it is honoured, ignored or refused")
        extra = metas[-1].extra or {}
        doc = metas[-1].description or ""
        result.append(FieldRule(name, extra["support"], doc, tuple(extra.get("accepts", ()))))
    return tuple(result)


@cache
def _decoder(cls: type[msgspec.Struct]) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(cls)


def decode(cls: type[S], body: bytes) -> S:
    """The body as `cls`. Raises RequestError naming the field that is unknown, missing, of a wrong type or range."""
    try:
        value: S = _decoder(cls).decode(body)
    except msgspec.ValidationError as error:
        raise _explain(cls, str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise RequestError("The body is nested too deeply", code="invalid_json") from error
    check_refused(value)
    return value


def check_refused(value: msgspec.Struct, where: str = "") -> None:
    """Raises RequestError for a refused field that asks for something. `where` is the path to `value`."""
    for rule in rules(type(value)):
        if rule.support == "refused" and not _neutral(getattr(value, rule.name), rule.accepts):
            message = f"{where}{rule.name} is not yet supported by this server"
            raise RequestError(message, param=f"{where}{rule.name}", code="unsupported_parameter")


def _neutral(value: Any, accepts: tuple[Any, ...]) -> bool:
    return any(type(value) is type(accepted) and value == accepted for accepted in accepts)


def _explain(cls: type[msgspec.Struct], problem: str) -> RequestError:
    """What msgspec says about a body, with the field's name as `param`."""
    unknown = _UNKNOWN.match(problem)
    if unknown:
        name, path = unknown["name"], unknown["path"] or ""
        param = f"{path.lstrip('.')}.{name}" if path else name
        hint = nearest(name, _names(cls, nested=bool(path)))
        return RequestError(f"Unknown field {_short(param)}{hint}", param=_short(param), code="unknown_parameter")
    found = _AT.match(problem)
    path = found["path"] if found and found["path"] else None
    text = found["problem"] if found else problem
    missing = re.match(r"Object missing required field `(\w+)`", text)
    if missing:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return RequestError(f"Missing required field {param}", param=param, code="missing_required_parameter")
    subject = f"{path}: " if path else "The body: "
    return RequestError(f"{subject}{text[0].lower()}{text[1:]}", param=path, code="invalid_value")


def _short(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


@cache
def _names(cls: type[msgspec.Struct], nested: bool) -> tuple[str, ...]:
    """Field names that a misspelt one could have meant: of the struct itself, or of the structs inside it."""
    if not nested:
        return cls.__struct_fields__
    found: dict[str, None] = {}
    for inner in _structs(cls) - {cls}:
        found.update(dict.fromkeys(inner.__struct_fields__))
    return tuple(found)


def _structs(hint: Any) -> set[type[msgspec.Struct]]:
    """Every struct type that a type mentions."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        result = {hint}
        for inner in typing.get_type_hints(hint, include_extras=False).values():
            result |= _structs(inner)
        return result
    return set().union(*(_structs(argument) for argument in typing.get_args(hint)))
