"""Routes for operators: probes, metrics, version, the schema. All but the schema answer while the model loads."""

import asyncio

import msgspec
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import headrace
from headrace.observe.metrics import Metrics
from headrace.server.errors import json_response, retry_headers
from headrace.server.service import Service


class Alive(msgspec.Struct, frozen=True):
    status: str = "alive"


class Readiness(msgspec.Struct, frozen=True, omit_defaults=True):
    """`status`: ready, loading, restarting, draining or dead. While loading: what is being done, and how far it is."""

    status: str
    phase: str = ""
    progress: float | UnsetType = UNSET  # 0..1
    error: str = ""


class Version(msgspec.Struct, frozen=True):
    version: str


async def livez(service: Service, request: Request) -> Response:
    """The event loop turns: that is all that a restart could mend."""
    return json_response(Alive())


async def readyz(service: Service, request: Request) -> Response:
    status = service.engine.status()
    if service.lifecycle.draining:
        return json_response(Readiness("draining"), 503, retry_headers(1.0))
    if status.state == "ready":
        return json_response(Readiness("ready"))
    progress = round(status.fraction, 4) if status.state == "loading" else UNSET
    body = Readiness(status.state, status.phase, progress, status.error)
    return json_response(body, 503, retry_headers(1.0))


async def metrics(service: Service, fold: Metrics, request: Request) -> Response:
    now = service.engine.gauges
    fold.set_gauges(now.num_running, now.num_waiting, now.kv_blocks_used, now.kv_blocks_total)
    fold.set_kv_cache(*service.engine.kv_cache)
    text = await asyncio.to_thread(fold.render)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def version(request: Request) -> Response:
    return json_response(Version(headrace.__version__))
