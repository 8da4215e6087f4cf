"""The application over a fake engine, and a client that needs no socket."""

from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from starlette.applications import Starlette
from starlette.testclient import TestClient

from headrace.base.config import Config
from headrace.server.app import create_app

MODEL = "toy"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(engine: FakeEngine) -> Starlette:
    return create_app(engine, Config(served_model_name=MODEL))


@pytest.fixture
def client(app: Starlette) -> Iterator[TestClient]:
    with TestClient(app, raise_server_exceptions=False) as test_client:
        yield test_client
