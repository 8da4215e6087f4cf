"""The OpenAPI document, made from the endpoint table and the structs that decode and encode the bodies."""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

import headrace
from headrace.server.errors import ErrorResponse


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route, as the router and the document see it."""

    method: str
    path: str  # Starlette's form: "/v1/models/{model:path}"
    handler: Callable[[Request], Awaitable[ASGIApp]]
    summary: str
    response: type[msgspec.Struct] | None = None  # None: plain text
    request: type[msgspec.Struct] | None = None
    chunk: type[msgspec.Struct] | None = None  # of a streamed answer
    unready: type[msgspec.Struct] = ErrorResponse  # body of a 503
    open: bool = False  # needs no key


def document(endpoints: Sequence[Endpoint]) -> bytes:
    """OpenAPI 3.1 as JSON."""
    structs: dict[str, type[msgspec.Struct]] = {"ErrorResponse": ErrorResponse}
    for endpoint in endpoints:
        for struct in (endpoint.request, endpoint.response, endpoint.chunk, endpoint.unready):
            if struct is not None:
                structs[struct.__name__] = struct
    _, components = msgspec.json.schema_components(structs.values(), ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = re.sub(r":\w+}", "}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Headrace", "version": headrace.__version__, "license": {"name": "Apache-2.0"}},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"key": []}],
        }
    )


def _operation(endpoint: Endpoint, path: str) -> dict[str, Any]:
    error = _json(ErrorResponse)
    responses: dict[str, Any] = {"200": _success(endpoint)}
    if not endpoint.open:
        responses["401"] = {"description": "The API key is missing or wrong", "content": error}
    if endpoint.request is not None:
        responses["400"] = {"description": "The request is wrong; `param` names the field", "content": error}
        responses["408"] = {"description": "The body came too slowly", "content": error}
        responses["413"] = {"description": "The body is too large", "content": error}
        responses["500"] = {"description": "The engine could not finish this one request", "content": error}
    if endpoint.request is not None or "{" in path:
        responses["404"] = {"description": "This model is not served here", "content": error}
    responses["503"] = {"description": "Loading, full or shutting down", "content": _json(endpoint.unready)}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    if endpoint.request is not None:
        operation["requestBody"] = {"required": True, "content": _json(endpoint.request)}
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if endpoint.open:
        operation["security"] = []
    return operation


def _success(endpoint: Endpoint) -> dict[str, Any]:
    content = _json(endpoint.response) if endpoint.response else {"text/plain": {"schema": {"type": "string"}}}
    if endpoint.chunk is not None:
        content["text/event-stream"] = {"schema": _event(endpoint.chunk)}
    return {"description": endpoint.summary, "content": content}


def _event(chunk: type[msgspec.Struct]) -> dict[str, Any]:
    """One server-sent event: a chunk as JSON, an ErrorResponse, or [DONE] at the end."""
    bodies = [
        {"contentMediaType": "application/json", "contentSchema": {"$ref": f"#/components/schemas/{struct.__name__}"}}
        for struct in (chunk, ErrorResponse)
    ]
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, *bodies]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _json(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{struct.__name__}"}}}
