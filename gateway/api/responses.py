"""``POST /v1/responses``, and what can be done with a response once it has an id."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from litestar import Request, Response, delete, get, post
from litestar.datastructures import State
from litestar.params import FromPath
from litestar.types import ASGIApp

from gateway.api.chat import log_unknown
from gateway.chat_request import ChatRequest
from gateway.openai_errors import ApiError, invalid_value, json_bytes, quoted, unsupported
from gateway.request_body import read_json_body
from gateway.request_record import RequestRecord
from gateway.responses.encoder import ResponseEncoder, ResponseIdentity
from gateway.responses.items import Item
from gateway.responses.running import Running, RunningResponse
from gateway.responses.schema import ResponseRequest, check_include, read_response_request
from gateway.responses.store import ResponseStore
from gateway.state import GatewayState
from gateway.turn import Turn, prepare_turn, tokenize

RESPONSE_ID_BYTES = 24
PAGE_ITEMS = 20
PAGE_ITEMS_MAX = 100


@dataclass(frozen=True, slots=True)
class Responses:
    """What the endpoints share, beside the gateway.

    Args:
        store: Those that are kept.
        running: Those that are being made, by id.
    """

    store: ResponseStore
    running: dict[str, Running] = field(default_factory=dict)

    def end(self, response: dict[str, object], asked: ResponseRequest) -> None:
        """A response is complete: from now on it is a stored one, or unknown."""
        self.running.pop(str(response["id"]), None)
        if asked.store:
            self.store.keep(response, asked.items)


@post("/v1/responses", status_code=200)
async def create_response(request: Request[None, None, State]) -> ASGIApp:
    """Check everything that can be checked before a token is generated, then hand over to the response."""
    gateway: GatewayState = request.app.state.gateway
    responses: Responses = request.app.state.responses
    record: RequestRecord = request.scope["state"]["record"]
    data = await read_json_body(request.receive, request.headers, bytes_max=gateway.body_bytes_max)
    asked = read_response_request(data, responses.store)
    gateway.model.check(asked.chat.model)
    log_unknown(asked.chat.unknown, record)
    with _speaking_of_input():
        turn = await prepare_turn(asked.chat, gateway, size=_size(asked.chat), request_id=record.request_id)
    identity = _identity(asked, turn, gateway)
    encoder = ResponseEncoder(
        identity,
        has_logprobs=asked.has_logprobs,
        unix_time=gateway.unix_time,
        on_end=lambda response: responses.end(response, asked),
    )
    answer = turn.respond(encoder, gateway, record)
    transcript = turn.answers[0].transcript
    return RunningResponse(identity.response_id, answer, encoder, transcript, responses.running, stream=turn.stream)


@post("/v1/responses/input_tokens", status_code=200)
async def count_input_tokens(request: Request[None, None, State]) -> Response[bytes]:
    """How many tokens the prompt of such a response has; nothing is generated."""
    gateway: GatewayState = request.app.state.gateway
    responses: Responses = request.app.state.responses
    data = await read_json_body(request.receive, request.headers, bytes_max=gateway.body_bytes_max)
    chat = read_response_request(data, responses.store).chat
    gateway.model.check(chat.model)
    log_unknown(chat.unknown, request.scope["state"]["record"])
    with _speaking_of_input():
        prompt = await tokenize(chat, gateway.tokenizer, size=_size(chat))
    return _json({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


@post("/v1/responses/compact")
async def compact_response() -> None:
    """Refused: without it the path would be taken for a response's.

    Raises:
        ApiError: 404.
    """
    raise ApiError(
        404, "POST /v1/responses/compact is not supported: a context is never compacted.", code="unknown_url"
    )


@get("/v1/responses/{response_id:str}")
async def get_response(request: Request[None, None, State], response_id: FromPath[str]) -> Response[bytes]:
    """A stored response, or a running one as it is now."""
    responses: Responses = request.app.state.responses
    query = request.query_params
    check_include(query.getall("include[]", []) + query.getall("include", []))
    if query.get("stream", "false").lower() != "false" or "starting_after" in query:
        raise unsupported("stream", "events are not stored; a response is given as a whole")
    running = responses.running.get(response_id)
    if running is not None:
        return _json(running.shown())
    return Response(responses.store.get(response_id).body, media_type="application/json")


@delete("/v1/responses/{response_id:str}", status_code=200)
async def delete_response(request: Request[None, None, State], response_id: FromPath[str]) -> Response[bytes]:
    """Forget a stored response."""
    responses: Responses = request.app.state.responses
    responses.store.delete(response_id)
    return _json({"id": response_id, "object": "response", "deleted": True})


@post("/v1/responses/{response_id:str}/cancel", status_code=200)
async def cancel_response(request: Request[None, None, State], response_id: FromPath[str]) -> Response[bytes]:
    """Stop a running response; one that has been cancelled is given as it is."""
    responses: Responses = request.app.state.responses
    running = responses.running.get(response_id)
    if running is not None:
        return _json(running.stop())
    stored = responses.store.get(response_id)
    if stored.status != "cancelled":
        message = f"Response {quoted(response_id)} has ended: only one that is being made can be cancelled."
        raise ApiError(400, message, param="response_id", code="response_not_running")
    return Response(stored.body, media_type="application/json")


@get("/v1/responses/{response_id:str}/input_items")
async def list_input_items(request: Request[None, None, State], response_id: FromPath[str]) -> Response[bytes]:
    """Everything that a stored response was made of, in pages."""
    responses: Responses = request.app.state.responses
    return _json(page(responses.store.inputs(response_id), request.query_params))


def page(items: list[Item], query: Mapping[str, str]) -> dict[str, object]:
    """A page of a list, as `limit`, `order` and `after` ask for it; the newest first unless `order` is `asc`.

    Raises:
        ApiError: 400.
    """
    limit = query.get("limit", str(PAGE_ITEMS))
    if not limit.isdecimal() or not 1 <= int(limit) <= PAGE_ITEMS_MAX:
        raise invalid_value("limit", f"expected an integer from 1 to {PAGE_ITEMS_MAX}, got {quoted(limit)}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_value("order", f"{quoted(order)} is not one of asc, desc")
    ordered = items if order == "asc" else items[::-1]
    rest = ordered[_after(ordered, query.get("after")) :]
    shown = rest[: int(limit)]
    ids = [item["id"] for item in shown] or [""]
    return {
        "object": "list",
        "data": shown,
        "first_id": ids[0],
        "last_id": ids[-1],
        "has_more": len(rest) > len(shown),
    }


def _after(items: list[Item], item_id: str | None) -> int:
    if item_id is None:
        return 0
    for index, item in enumerate(items):
        if item["id"] == item_id:
            return index + 1
    raise invalid_value("after", f"{quoted(item_id)} is not one of the items")


def _size(chat: ChatRequest) -> int:
    """About how many characters the prompt has: stored messages are not in the body."""
    return len(json_bytes(chat.messages))


@contextmanager
def _speaking_of_input() -> Iterator[None]:
    """Errors of the shared code speak of messages; this endpoint has an input."""
    try:
        yield
    except ApiError as error:
        if error.param == "messages":
            error.param = "input"
        raise


def _identity(asked: ResponseRequest, turn: Turn, gateway: GatewayState) -> ResponseIdentity:
    sampling = turn.generation.choices[0]
    drawn: dict[str, object] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    return ResponseIdentity(
        response_id=mint_response_id(),
        created_at=int(gateway.unix_time()),
        model=gateway.model.name,
        echo={**asked.echo, **drawn},
    )


def mint_response_id() -> str:
    """A fresh id, which nobody can guess: whoever knows it may read the response."""
    return f"resp_{secrets.token_hex(RESPONSE_ID_BYTES)}"


def _json(value: object) -> Response[bytes]:
    return Response(json_bytes(value), media_type="application/json")
