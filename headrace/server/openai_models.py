"""GET /v1/models and /v1/models/{model}: the one model served here."""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.server.errors import json_response
from headrace.server.service import Service


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "headrace"
    max_model_len: int  # extension: most tokens of prompt and answer together


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


async def list_models(service: Service, request: Request) -> Response:
    service.require_ready()
    return json_response(ModelList(data=[_model(service)]))


async def retrieve_model(service: Service, request: Request) -> Response:
    service.require_ready()
    service.check_model(request.path_params["model"])
    return json_response(_model(service))


def _model(service: Service) -> Model:
    return Model(id=service.model_name, created=service.created, max_model_len=service.engine.max_model_len)
