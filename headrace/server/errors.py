"""Every failure in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

`ErrorBoundary` is the one place that turns exceptions into responses. What it did not expect becomes a 500 that says
nothing of the inside; the traceback goes to the log, with the request id.
"""

import logging
import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.base.errors import OverloadedError, RequestError

log = logging.getLogger(__name__)

_TITLES = {404: "There is no such route", 405: "This route does not take that method"}
_CODES = {404: "not_found", 405: "method_not_allowed"}


class Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    error: Error


class BodyTooLargeError(RequestError):
    """The body is larger than the server reads."""

    status = 413


class BodyTimeoutError(RequestError):
    """The client took too long to send its body."""

    status = 408


class ClientDisconnectedError(Exception):
    """The client went away: nobody is left to answer."""


def error_of(error: Exception) -> Error:
    """What a client learns of an exception."""
    if isinstance(error, RequestError):
        code = error.code or ("invalid_value" if error.status == 400 else None)
        return Error(error.message, error.type, error.param, code)
    return Error("The server failed to handle this request", "server_error", code="internal_error")


def error_response(error: Exception) -> Response:
    status = error.status if isinstance(error, RequestError) else 500
    headers = retry_headers(error.retry_after if isinstance(error, OverloadedError) else 1.0) if status == 503 else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(ErrorResponse(error_of(error)), status, headers)


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def retry_headers(seconds: float) -> dict[str, str]:
    """The same wait for every kind of client: whole seconds, milliseconds, and the SDKs' own word."""
    return {
        "retry-after": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(max(1, math.ceil(seconds * 1000))),
        "x-should-retry": "true",
    }


async def http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in OpenAI's shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{_TITLES.get(status, 'The request failed')}: {request.method} {request.scope['path'][:200]}"
    body = ErrorResponse(Error(message, "invalid_request_error", code=_CODES.get(status)))
    return json_response(body, status, dict(getattr(error, "headers", None) or {}))


class ErrorBoundary:
    """ASGI middleware: an exception below becomes a response, if one can still be sent."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except ClientDisconnectedError:
            return
        except Exception as error:
            if not isinstance(error, RequestError):
                log.exception("request %s failed", scope.get("state", {}).get("request_id", ""))
            if started:
                raise  # the server closes the connection: a cut body must not look whole
            await error_response(error)(scope, receive, send)
