"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from litestar import Request, Response, get
from litestar.datastructures import State
from litestar.params import FromPath

from gateway.openai_errors import json_bytes
from gateway.state import GatewayState

OWNER = "meshnet"


@get("/v1/models")
async def list_models(request: Request[None, None, State]) -> Response[bytes]:
    """The served model, under each name it answers to."""
    gateway: GatewayState = request.app.state.gateway
    models = [_describe(gateway, name) for name in gateway.model.accepted]
    return _json({"object": "list", "data": models})


@get("/v1/models/{model_id:path}")
async def get_model(request: Request[None, None, State], model_id: FromPath[str]) -> Response[bytes]:
    """One model; an id with slashes may come raw or encoded."""
    gateway: GatewayState = request.app.state.gateway
    name = model_id.removeprefix("/")
    gateway.model.check(name)
    return _json(_describe(gateway, name))


def _describe(gateway: GatewayState, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": gateway.model.created,
        "owned_by": OWNER,
        "root": gateway.model.name,
        "parent": None,
        "max_model_len": gateway.tokenizer.context_len,
    }


def _json(value: object) -> Response[bytes]:
    return Response(json_bytes(value), media_type="application/json")
