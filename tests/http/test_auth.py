"""Keys: every route but the probes is closed, whatever the path or the Host header pretends."""

import pytest
from asgi_call import Call
from fake_engine import FakeEngine
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient
from test_streaming import run

from headrace.base.config import Config
from headrace.server.app import create_app
from headrace.server.auth import OPEN_PATHS, parse_keys

KEY = "sk-Headrace-ké"


@pytest.fixture
def closed(engine: FakeEngine) -> Starlette:
    return create_app(engine, Config(api_key=f" {KEY} ,second"))


def bearer(key: str) -> dict[str, bytes]:
    return {"Authorization": b"Bearer " + key.encode()}


def test_keys_are_separated_by_commas() -> None:
    assert parse_keys(" a, b ,,c") == ("a", "b", "c") and parse_keys(" ,") == ()


def test_every_route_is_closed_but_the_probes(closed: Starlette) -> None:
    client = TestClient(closed)
    routes = [route for route in closed.routes if isinstance(route, Route)]
    assert len(routes) >= 12
    for route in routes:
        for method in route.methods or ():
            response = client.request(method, route.path.replace("{model:path}", "toy"))
            assert (response.status_code == 401) == (route.path not in OPEN_PATHS), route.path
            if response.status_code == 401 and method != "HEAD":
                assert response.json()["error"]["type"] == "authentication_error"
                assert response.headers["www-authenticate"] == "Bearer" and response.headers["x-request-id"]


@pytest.mark.parametrize(
    "path",
    ["/nope", "//livez", "/livez/", "/livez/../v1/models", "/livez;a", "/LIVEZ", "/%2e/livez", "/v1/models?/livez"],
)
def test_paths_that_look_open_are_closed(closed: Starlette, path: str) -> None:
    assert TestClient(closed, follow_redirects=False).get(f"http://testserver{path}").status_code == 401


def test_the_host_header_decides_nothing(closed: Starlette) -> None:
    for host in ("a/livez?x=", "x/livez#", "localhost/livez"):
        assert TestClient(closed).get("/v1/models", headers={"Host": host}).status_code == 401


@pytest.mark.parametrize(
    "headers", [bearer(KEY), bearer("second"), {"x-api-key": KEY.encode()}, {"x-api-key": b"second"}]
)
def test_a_right_key_opens(closed: Starlette, headers: dict[str, bytes]) -> None:
    assert TestClient(closed).get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY.upper()),
        bearer(KEY[:-1]),
        bearer(f"{KEY},second"),
        bearer(""),
        {"Authorization": KEY.encode()},
        {"Authorization": b"Basic " + KEY.encode()},
        {"x-api-key": b""},
    ],
)
def test_a_wrong_key_does_not(closed: Starlette, headers: dict[str, bytes]) -> None:
    assert TestClient(closed).get("/v1/models", headers=headers).status_code == 401


def test_without_keys_everything_is_open(client: TestClient) -> None:
    assert client.get("/v1/models").status_code == 200


def test_each_key_has_a_prefix_cache_of_its_own(closed: Starlette, engine: FakeEngine) -> None:
    client = TestClient(closed)
    for key in (KEY, "second", "second"):
        body = {"prompt": "a", "cache_salt": "s"}
        assert client.post("/v1/completions", json=body, headers=bearer(key)).status_code == 200
    first, second, third = (request.cache_salt for request in engine.requests)
    assert first != second == third and KEY not in first


def test_a_refused_body_is_not_read(closed: Starlette) -> None:
    async def test() -> None:
        async with Call(closed, "/v1/completions", b"{") as call:
            assert (await call.start())[0] == 401

    run(test)
