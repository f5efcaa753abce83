"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, as Anthropic's clients call them."""

from __future__ import annotations

import secrets

from litestar import Request, Response, post
from litestar.datastructures import State
from litestar.types import ASGIApp

from gateway.api.chat import log_unknown
from gateway.messages.encoder import MessageEncoder, MessageIdentity
from gateway.messages.schema import MessageRequest, read_message_request
from gateway.openai_errors import json_bytes
from gateway.request_body import read_json_body
from gateway.request_record import RequestRecord
from gateway.state import GatewayState
from gateway.turn import prepare_turn, tokenize


@post("/v1/messages", status_code=200)
async def create_message(request: Request[None, None, State]) -> ASGIApp:
    """Check everything that can be checked before a token is generated, then hand over to the response."""
    gateway: GatewayState = request.app.state.gateway
    record: RequestRecord = request.scope["state"]["record"]
    asked, size = await _read(request, counts_only=False)
    turn = await prepare_turn(asked.chat, gateway, size=size, request_id=record.request_id)
    identity = MessageIdentity(
        message_id=f"msg_{secrets.token_hex(14)}",
        model=gateway.model.name,
        prompt_tokens=len(turn.generation.prompt_ids),
        request_id=record.request_id,
    )
    return turn.respond(MessageEncoder(identity, shows_thinking=asked.shows_thinking), gateway, record)


@post("/v1/messages/count_tokens", status_code=200)
async def count_message_tokens(request: Request[None, None, State]) -> Response[bytes]:
    """How many tokens the prompt of such a message has; nothing is generated."""
    gateway: GatewayState = request.app.state.gateway
    asked, size = await _read(request, counts_only=True)
    prompt = await tokenize(asked.chat, gateway.tokenizer, size=size)
    return Response(json_bytes({"input_tokens": len(prompt.ids)}), media_type="application/json")


async def _read(request: Request[None, None, State], *, counts_only: bool) -> tuple[MessageRequest, int]:
    """The checked request, and how many bytes its body had."""
    gateway: GatewayState = request.app.state.gateway
    data = await read_json_body(request.receive, request.headers, bytes_max=gateway.body_bytes_max)
    asked = read_message_request(data, counts_only=counts_only)
    gateway.model.check(asked.chat.model)
    log_unknown(asked.chat.unknown, request.scope["state"]["record"])
    return asked, len(data)
