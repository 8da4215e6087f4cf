"""Failures outside a request's fields: wrong routes, bodies too large or too slow, ids, unready engines."""

import asyncio
from typing import Any

import pytest
from asgi_call import Call, payload
from fake_engine import FakeEngine
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send
from test_streaming import run

from headrace.base.config import Config
from headrace.engine.generation import EngineStatus
from headrace.server.app import create_app
from headrace.server.context import BodyLimit, read_body
from headrace.server.errors import BodyTimeoutError, ErrorBoundary
from headrace.server.lifecycle import Lifecycle


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/livez/", 404, "not_found"),
        ("POST", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/completions", 405, "method_not_allowed"),
    ],
)
def test_wrong_routes_answer_in_openais_shape(
    client: TestClient, method: str, path: str, status: int, code: str
) -> None:
    response = client.request(method, path)
    assert response.status_code == status and response.json()["error"]["code"] == code
    assert (status == 405) == ("allow" in response.headers)


@pytest.mark.parametrize("given", ["abc", "A-1._z", "x" * 128])
def test_a_plain_request_id_comes_back(client: TestClient, given: str) -> None:
    assert client.get("/livez", headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a/b", "a:80", "é".encode(), "a\tb"])
def test_any_other_request_id_is_replaced(client: TestClient, given: Any) -> None:
    assert client.get("/livez", headers={"x-request-id": given}).headers["x-request-id"].startswith("req_")


def test_a_clients_request_id_is_not_the_engines(client: TestClient, engine: FakeEngine) -> None:
    for _ in range(2):
        assert client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "same"}).status_code == 200
    assert len({request.request_id for request in engine.requests}) == 2


def limited(max_bytes: int) -> Any:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            more = (await receive()).get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"read"})

    return ErrorBoundary(BodyLimit(echo, max_bytes))


@pytest.mark.parametrize(("size", "status"), [(10, 200), (11, 413)])
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit_is_refused_announced_or_not(size: int, status: int, announced: bool) -> None:
    async def test() -> None:
        headers = {"content-length": str(size)} if announced else {}
        async with Call(limited(10), "/", b"x" * size, headers=headers) as call:
            assert (await call.start())[0] == status
            if status == 413:
                assert '"code":"body_too_large"' in await call.frame()

    run(test)


def test_a_body_that_never_comes_is_given_up() -> None:
    class Request:
        async def body(self) -> bytes:
            await asyncio.Event().wait()
            return b""

    async def test() -> None:
        with pytest.raises(BodyTimeoutError):
            await read_body(Request(), 0.01)  # type: ignore[arg-type]

    run(test)


def test_a_client_that_leaves_in_the_middle_of_its_body_gets_no_answer(app: Starlette, engine: FakeEngine) -> None:
    async def test() -> None:
        inbox: list[Message] = [
            {"type": "http.request", "body": b'{"prompt": ', "more_body": True},
            {"type": "http.disconnect"},
        ]
        sent: list[Message] = []

        async def receive() -> Message:
            return inbox.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await app(scope, receive, send)
        assert not sent and not engine.requests

    run(test)


def test_a_defect_of_our_own_is_a_500_with_nothing_in_it(client: TestClient, engine: FakeEngine) -> None:
    engine.max_model_len = None  # type: ignore[assignment]
    response = client.post("/v1/completions", json={"prompt": "secret"})
    assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text and "NoneType" not in response.text


CLOSED = [("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/detokenize")]


@pytest.mark.parametrize(("method", "path"), [*CLOSED, ("GET", "/v1/models"), ("GET", "/v1/models/toy")])
@pytest.mark.parametrize("state", ["loading", "restarting", "dead", "draining"])
def test_an_unready_engine_is_a_503_that_says_why(
    client: TestClient, engine: FakeEngine, method: str, path: str, state: str
) -> None:
    engine.state = EngineStatus(state, "packing weights", 0.25, "killed by SIGKILL")
    response = client.request(method, path, json={})
    assert response.status_code == 503 and response.headers["retry-after"]
    message = response.json()["error"]["message"]
    expected = {"loading": "packing weights, 25%", "restarting": "restarting", "dead": "SIGKILL", "draining": "down"}
    assert expected[state] in message


def test_probes_tell_loading_ready_and_dead_apart(client: TestClient, engine: FakeEngine) -> None:
    assert client.get("/readyz").json() == {"status": "ready"}
    engine.state = EngineStatus("loading", "reading", 0.5)
    for path in ("/readyz", "/health"):
        response = client.get(path)
        assert response.status_code == 503
        assert response.json() == {"status": "loading", "phase": "reading", "progress": 0.5}
    engine.state = EngineStatus("restarting", error="the engine was killed by SIGKILL")
    assert client.get("/readyz").json() == {"status": "restarting", "error": "the engine was killed by SIGKILL"}
    assert client.get("/livez").status_code == 200 and client.get("/metrics").status_code == 200
    assert client.get("/version").json()["version"]


def test_a_draining_server_finishes_what_runs_and_takes_nothing_new() -> None:
    async def test() -> None:
        engine, lifecycle = FakeEngine(hold_at=3), Lifecycle()
        app = create_app(engine, Config(), lifecycle=lifecycle)
        body = {"prompt": "a", "stream": True}
        async with Call(app, "/v1/completions", body) as running:
            await engine.held.wait()
            lifecycle.drain()
            assert not await lifecycle.wait_idle(0.01)
            async with Call(app, "/v1/completions", body) as late:
                status, headers = await late.start()
                assert status == 503 and headers["connection"] == "close" and headers["retry-after"]
            async with Call(app, "/readyz", b"", method="GET") as probe:
                assert (await probe.start())[0] == 503
                assert await probe.frame() == '{"status":"draining"}'
            engine.hold.set()
            await running.start()
            *_, last, done = await running.rest()
            assert payload(last)["choices"][0]["finish_reason"] == "length" and done == "data: [DONE]\n\n"
            await running.ended()
            assert await lifecycle.wait_idle(10) and lifecycle.live == 0

    run(test)
