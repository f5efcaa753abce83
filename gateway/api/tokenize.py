"""``POST /tokenize``, ``POST /detokenize`` and ``GET /tokenizer_info``, as vLLM has them; also under ``/v1``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from litestar import Request, Response, get, post
from litestar.datastructures import State

from gateway.chat_request import TemplateAsked
from gateway.openai_errors import json_bytes
from gateway.request_body import read_json_body
from gateway.state import GatewayState
from gateway.text_input import check_ids, check_total, input_too_long
from gateway.tokenize_schema import TokenizeRequest, read_detokenize_request, read_tokenize_request
from gateway.tokenizer import ChatTokenizer, PromptTooLong

DETOKENIZE_TOKENS_MAX = 2**17
"""Of one call, or as many as the context has: decoding these stops everything else for some 50 ms."""
TOKEN_STRINGS_MAX = 2**17
"""Of one call, or as many as the context has: each is some 50 bytes in memory and 10 of the response."""


@post(["/tokenize", "/v1/tokenize"], status_code=200)
async def tokenize(request: Request[None, None, State]) -> Response[bytes]:
    """The ids of a text, or of messages as a chat would have them. A text may be longer than the context."""
    gateway: GatewayState = request.app.state.gateway
    data = await read_json_body(request.receive, request.headers, bytes_max=gateway.body_bytes_max)
    asked = read_tokenize_request(data)
    gateway.model.check(asked.model)
    tokenizer = gateway.tokenizer
    ids = await _token_ids(asked, tokenizer, size=len(data))
    if asked.token_strings:
        check_total([ids], "return_token_strs", tokens_max=max(TOKEN_STRINGS_MAX, tokenizer.context_len))
    body = await tokenizer.run_long(partial(_tokenized, ids, tokenizer, shows=asked.token_strings), size=len(ids))
    return Response(body, media_type="application/json")


@post(["/detokenize", "/v1/detokenize"], status_code=200)
async def detokenize(request: Request[None, None, State]) -> Response[bytes]:
    """The text of ids, special tokens shown."""
    gateway: GatewayState = request.app.state.gateway
    data = await read_json_body(request.receive, request.headers, bytes_max=gateway.body_bytes_max)
    asked = read_detokenize_request(data)
    gateway.model.check(asked.model)
    check_total([asked.tokens], "tokens", tokens_max=max(DETOKENIZE_TOKENS_MAX, gateway.tokenizer.context_len))
    check_ids(asked.tokens, gateway.tokenizer, "tokens")
    decode = partial(gateway.tokenizer.decode, asked.tokens, skip_special_tokens=False)
    text = await gateway.tokenizer.run_long(decode, size=len(asked.tokens))
    return Response(json_bytes({"prompt": text}), media_type="application/json")


@get(["/tokenizer_info", "/v1/tokenizer_info"])
async def get_tokenizer_info(request: Request[None, None, State]) -> Response[bytes]:
    """Special tokens and chat template, for callers that render prompts themselves."""
    gateway: GatewayState = request.app.state.gateway
    return Response(json_bytes(gateway.tokenizer.description()), media_type="application/json")


def _tokenized(ids: Sequence[int], tokenizer: ChatTokenizer, *, shows: bool) -> bytes:
    strings = tokenizer.token_strings(ids) if shows else None
    return json_bytes({"count": len(ids), "max_model_len": tokenizer.context_len, "tokens": ids, "token_strs": strings})


async def _token_ids(asked: TokenizeRequest, tokenizer: ChatTokenizer, *, size: int) -> tuple[int, ...]:
    if not asked.messages:
        (ids,) = await tokenizer.encode_texts([asked.text], add_special_tokens=asked.add_special_tokens)
        return ids
    template = TemplateAsked(add_generation_prompt=asked.add_generation_prompt)
    try:
        return (await tokenizer.prompt(asked.messages, template, size=size)).ids
    except PromptTooLong as error:
        raise input_too_long(error.tokens_min, tokenizer.context_len, "messages", at_least=True) from error
