"""``POST /v1/chat/completions``."""

from __future__ import annotations

import secrets

import structlog
from litestar import Request, post
from litestar.datastructures import State
from litestar.types import ASGIApp

from gateway.chat_encoder import ChatEncoder, ChatOptions, CompletionIdentity
from gateway.chat_request import ChatRequest
from gateway.openai_schema import read_chat_request
from gateway.request_body import read_json_body
from gateway.request_record import RequestRecord
from gateway.state import GatewayState
from gateway.turn import Turn, prepare_turn

UNKNOWN_LOGGED_MAX = 10

log = structlog.get_logger(__name__)


@post("/v1/chat/completions", status_code=200)
async def create_chat_completion(request: Request[None, None, State]) -> ASGIApp:
    """Check everything that can be checked before a token is generated, then hand over to the response."""
    gateway: GatewayState = request.app.state.gateway
    record: RequestRecord = request.scope["state"]["record"]
    data = await read_json_body(request.receive, request.headers, bytes_max=gateway.body_bytes_max)
    chat = read_chat_request(data)
    gateway.model.check(chat.model)
    log_unknown(chat.unknown, record)
    turn = await prepare_turn(chat, gateway, size=len(data), request_id=record.request_id)
    identity = completion_identity("chatcmpl", gateway)
    encoder = ChatEncoder(identity, _options(chat, turn), choices=len(turn.answers))
    return turn.respond(encoder, gateway, record)


def completion_identity(prefix: str, gateway: GatewayState) -> CompletionIdentity:
    """A fresh identity for one response."""
    return CompletionIdentity(
        completion_id=f"{prefix}-{secrets.token_hex(14)}",
        created=int(gateway.unix_time()),
        model=gateway.model.name,
        fingerprint=f"fp_{gateway.model.fingerprint}",
    )


def log_unknown(names: tuple[str, ...], record: RequestRecord) -> None:
    """Say once per call which fields were not known; they are some client's own."""
    if names:
        shown = [name[:64] for name in names[:UNKNOWN_LOGGED_MAX]]
        log.warning("request.unknown_fields", request_id=record.request_id, names=shown)


def _options(chat: ChatRequest, turn: Turn) -> ChatOptions:
    return ChatOptions(
        include_usage=chat.include_usage,
        continuous_usage=chat.continuous_usage,
        logprobs=chat.answer.logprobs is not None,
        token_ids=chat.answer.token_ids,
        prompt_ids=turn.generation.prompt_ids,
        prompt_tokens=len(turn.generation.prompt_ids),
        service_tier=chat.service_tier,
    )
