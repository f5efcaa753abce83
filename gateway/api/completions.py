"""``POST /v1/completions``."""

from __future__ import annotations

from litestar import Request, post
from litestar.datastructures import State
from litestar.types import ASGIApp

from gateway.api.chat import completion_identity, log_unknown
from gateway.completions.prepare import prepare_completion
from gateway.completions.schema import read_completion_request
from gateway.request_body import read_json_body
from gateway.request_record import RequestRecord
from gateway.state import GatewayState


@post("/v1/completions", status_code=200)
async def create_completion(request: Request[None, None, State]) -> ASGIApp:
    """Check everything that can be checked before a token is generated, then hand over to the response."""
    gateway: GatewayState = request.app.state.gateway
    record: RequestRecord = request.scope["state"]["record"]
    data = await read_json_body(request.receive, request.headers, bytes_max=gateway.body_bytes_max)
    asked = read_completion_request(data)
    gateway.model.check(asked.model)
    log_unknown(asked.unknown, record)
    prepared = await prepare_completion(asked, gateway, request_id=record.request_id)
    return prepared.respond(completion_identity("cmpl", gateway), gateway, record)
