"""The ASGI application: one table of endpoints, one visible list of middleware.

Requests pass the middleware from top to bottom. Nothing here knows how answers are made, or that uvicorn exists.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import headrace
from headrace.base.clock import Clock, SystemClock
from headrace.base.config import Config
from headrace.core.limits import LIMITS
from headrace.observe.metrics import Metrics
from headrace.server import openai_chat, openai_completions, openai_models, operations, tokenize
from headrace.server.auth import Auth, parse_keys
from headrace.server.context import BodyLimit, RequestContext
from headrace.server.errors import ErrorBoundary, http_exception
from headrace.server.lifecycle import Lifecycle
from headrace.server.openapi import Endpoint, document
from headrace.server.service import Engine, Service, served_name

_BODY_TIMEOUT_S = 60.0


def create_app(
    engine: Engine,
    config: Config,
    metrics: Metrics | None = None,
    lifecycle: Lifecycle | None = None,
    clock: Clock | None = None,
) -> Starlette:
    """The application over an engine, which may still be loading."""
    lifecycle = lifecycle or Lifecycle()
    name = served_name(config)
    service = Service(
        engine=engine,
        lifecycle=lifecycle,
        model_name=name,
        created=int(time.time()),
        keep_alive_interval=config.keep_alive_interval,
        body_timeout=_BODY_TIMEOUT_S,
    )
    table = endpoints(service, metrics or Metrics(name, headrace.__version__))
    schema = document(table)

    async def openapi(request: Request) -> Response:
        return Response(schema, media_type="application/json")

    app = Starlette(
        routes=[
            *(Route(endpoint.path, endpoint.handler, methods=[endpoint.method]) for endpoint in table),
            Route("/openapi.json", openapi),
        ],
        middleware=[
            Middleware(RequestContext, clock=clock or SystemClock(), lifecycle=lifecycle),
            Middleware(ErrorBoundary),
            Middleware(Auth, keys=parse_keys(config.api_key)),
            Middleware(BodyLimit, max_bytes=LIMITS.max_body_bytes),
        ],
        exception_handlers={HTTPException: http_exception},
    )
    app.router.redirect_slashes = False  # a redirect would answer before the 404 in our own shape
    return app


Handler = Callable[[Service, Request], Awaitable[ASGIApp]]


def endpoints(service: Service, metrics: Metrics) -> list[Endpoint]:
    """Every route but the schema's own."""

    def post(path: str, handler: Handler, summary: str, structs: Sequence[type[Struct]]) -> Endpoint:
        """`structs`: of the request, of the answer and, where it can be streamed, of a chunk."""
        request, response, chunk = (*structs, None)[:3]
        return Endpoint("POST", path, partial(handler, service), summary, response, request, chunk)

    def get(path: str, handler: Handler, summary: str, struct: type[Struct]) -> Endpoint:
        return Endpoint("GET", path, partial(handler, service), summary, struct)

    def probe(path: str, handler: Handler, summary: str, struct: type[Struct]) -> Endpoint:
        return Endpoint("GET", path, partial(handler, service), summary, struct, unready=struct, open=True)

    chat = (openai_chat.ChatRequest, openai_chat.ChatCompletion, openai_chat.ChatChunk)
    plain = (openai_completions.CompletionRequest, openai_completions.Completion, openai_completions.Completion)
    to_ids = (tokenize.TokenizeRequest, tokenize.TokenizeResponse)
    to_text = (tokenize.DetokenizeRequest, tokenize.DetokenizeResponse)
    return [
        post("/v1/chat/completions", openai_chat.create, "Answer a conversation", chat),
        post("/v1/completions", openai_completions.create, "Continue a text", plain),
        get("/v1/models", openai_models.list_models, "List the served model", openai_models.ModelList),
        get("/v1/models/{model:path}", openai_models.retrieve_model, "Describe the served model", openai_models.Model),
        post("/tokenize", tokenize.tokenize, "Token ids of a text or a conversation", to_ids),
        post("/detokenize", tokenize.detokenize, "Text of token ids", to_text),
        probe("/livez", operations.livez, "The process can answer", operations.Alive),
        probe("/readyz", operations.readyz, "The model can answer; progress while it loads", operations.Readiness),
        probe("/health", operations.readyz, "The same as /readyz", operations.Readiness),
        Endpoint("GET", "/metrics", partial(operations.metrics, service, metrics), "Prometheus metrics"),
        Endpoint("GET", "/version", operations.version, "Version of the server", operations.Version),
    ]
