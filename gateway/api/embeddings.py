"""``POST /v1/embeddings``."""

from __future__ import annotations

from litestar import Request, Response, post
from litestar.datastructures import State

from gateway.api.chat import log_unknown
from gateway.client_watch import run_for_client
from gateway.embeddings.embed import embed_all, embeddings_body
from gateway.embeddings.schema import EmbeddingsRequest, read_embeddings_request
from gateway.openai_errors import from_mesh_error
from gateway.request_body import read_json_body
from gateway.request_record import RequestRecord
from gateway.state import GatewayState
from gateway.text_input import check_total, input_paths, input_too_long, tokenize_inputs
from shared.errors import MeshError

EMBEDDING_TOKENS_MAX = 300_000
"""Of one call; as OpenAI's."""


@post("/v1/embeddings", status_code=200)
async def create_embeddings(request: Request[None, None, State]) -> Response[bytes]:
    """Check everything, then pool the hidden states of each input."""
    gateway: GatewayState = request.app.state.gateway
    record: RequestRecord = request.scope["state"]["record"]
    data = await read_json_body(request.receive, request.headers, bytes_max=gateway.body_bytes_max)
    asked = read_embeddings_request(data)
    gateway.model.check(asked.model)
    log_unknown(asked.unknown, record)
    ids = await _input_ids(asked, gateway)
    tokens = sum(map(len, ids))
    record.fields.update(prompt_tokens=tokens, inputs=len(ids))
    work = embed_all(gateway.generator, ids, asked, request_id=record.request_id)
    try:
        vectors = await run_for_client(request.receive, work)
    except MeshError as error:
        raise from_mesh_error(error) from error
    body = embeddings_body(vectors, asked, model=gateway.model.name, tokens=tokens)
    return Response(body, media_type="application/json")


async def _input_ids(asked: EmbeddingsRequest, gateway: GatewayState) -> list[tuple[int, ...]]:
    tokenizer = gateway.tokenizer
    ids = await tokenize_inputs(asked.inputs, tokenizer, "input", add_special_tokens=asked.add_special_tokens)
    for one, path in zip(ids, input_paths(asked.inputs, "input"), strict=True):
        if len(one) > tokenizer.context_len:
            raise input_too_long(len(one), tokenizer.context_len, path)
    check_total(ids, "input", tokens_max=EMBEDDING_TOKENS_MAX)
    return ids
