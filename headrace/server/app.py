"""The ASGI application: one table of endpoints, one visible list of middleware.

Requests pass the middleware from top to bottom. Nothing here knows how answers are made, or that uvicorn exists.
"""

import time
from collections.abc import Awaitable, Callable
from functools import partial

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
from headrace.observe.metrics import Metrics
from headrace.server import openai_chat, openai_completions, openai_models, operations, tokenize
from headrace.server.auth import Auth, parse_keys
from headrace.server.context import BodyLimit, RequestContext
from headrace.server.errors import ErrorBoundary, http_exception
from headrace.server.lifecycle import Lifecycle
from headrace.server.openapi import Endpoint, document
from headrace.server.sampling_fields import LIMITS
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


def endpoints(service: Service, metrics: Metrics) -> list[Endpoint]:
    """Every route but the schema's own."""

    def bind(handler: Callable[[Service, Request], Awaitable[ASGIApp]]) -> Callable[[Request], Awaitable[ASGIApp]]:
        return partial(handler, service)

    return [
        Endpoint(
            "POST",
            "/v1/chat/completions",
            bind(openai_chat.create),
            "Answer a conversation",
            request=openai_chat.ChatRequest,
            response=openai_chat.ChatCompletion,
            chunk=openai_chat.ChatChunk,
        ),
        Endpoint(
            "POST",
            "/v1/completions",
            bind(openai_completions.create),
            "Continue a text",
            request=openai_completions.CompletionRequest,
            response=openai_completions.Completion,
            chunk=openai_completions.Completion,
        ),
        Endpoint(
            "GET",
            "/v1/models",
            bind(openai_models.list_models),
            "List the served model",
            response=openai_models.ModelList,
        ),
        Endpoint(
            "GET",
            "/v1/models/{model:path}",
            bind(openai_models.retrieve_model),
            "Describe the served model",
            response=openai_models.Model,
        ),
        Endpoint(
            "POST",
            "/tokenize",
            bind(tokenize.tokenize),
            "Token ids of a text or a conversation",
            request=tokenize.TokenizeRequest,
            response=tokenize.TokenizeResponse,
        ),
        Endpoint(
            "POST",
            "/detokenize",
            bind(tokenize.detokenize),
            "Text of token ids",
            request=tokenize.DetokenizeRequest,
            response=tokenize.DetokenizeResponse,
        ),
        Endpoint("GET", "/livez", bind(operations.livez), "The process is alive", operations.Alive, open=True),
        *(
            Endpoint(
                "GET",
                path,
                bind(operations.readyz),
                "The model can answer; with progress while it loads",
                response=operations.Readiness,
                unready=operations.Readiness,
                open=True,
            )
            for path in ("/readyz", "/health")
        ),
        Endpoint("GET", "/metrics", partial(operations.metrics, service, metrics), "Prometheus metrics"),
        Endpoint("GET", "/version", operations.version, "Version of the server", operations.Version),
    ]
