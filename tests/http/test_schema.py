"""The OpenAPI document describes the server that is there: schemathesis asks, nothing breaks, answers fit."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fake_engine import FakeEngine
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route
from starlette.testclient import TestClient

from headrace.base.config import Config
from headrace.server.app import create_app

APP = create_app(FakeEngine(text="short"), Config(served_model_name="toy"))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


@SCHEMA.parametrize()
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_breaks_the_server_and_every_answer_fits_the_document(case: Any) -> None:
    case.call_and_validate(checks=CHECKS)


def test_the_document_has_every_route_and_no_other() -> None:
    document = TestClient(APP).get("/openapi.json").json()
    described = {(path, method.upper()) for path, item in document["paths"].items() for method in item}
    routed = {
        (route.path.replace(":path", ""), method)
        for route in APP.routes
        if isinstance(route, Route) and route.path != "/openapi.json"
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert described == routed


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_every_reference_leads_somewhere() -> None:
    document = TestClient(APP).get("/openapi.json").json()
    found = set(references(document))
    assert found and found <= {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest"])
def test_every_field_is_described_and_unknown_ones_are_excluded(name: str) -> None:
    schema = TestClient(APP).get("/openapi.json").json()["components"]["schemas"][name]
    assert schema["additionalProperties"] is False
    assert all(field.get("description") for field in schema["properties"].values())
