"""``POST /v1/chat/completions``."""

from __future__ import annotations

import hashlib
import secrets

import structlog
from litestar import Request, post
from litestar.datastructures import State
from litestar.types import ASGIApp

from gateway.answer import Answer
from gateway.chat_response import ChatResponse
from gateway.generation_request import GenerationRequest
from gateway.openai_errors import context_length_exceeded
from gateway.openai_schema import ChatRequest, read_chat_request
from gateway.openai_stream import CompletionIdentity
from gateway.request_body import read_json_body
from gateway.request_record import RequestRecord
from gateway.state import SEED_BITS, GatewayState
from gateway.stop import StopMatcher
from gateway.tokenizer import ChatTokenizer, PromptTooLong
from shared.messages import SamplingParams

GREEDY_BELOW = 1e-5
"""Dividing logits by less overflows; the limit they tend to is the greedy choice."""
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
    if chat.unknown:
        log.warning("request.unknown_fields", request_id=record.request_id, names=_shown(chat.unknown))
    prompt_ids = await tokenize(chat, gateway.tokenizer, size=len(data))
    max_tokens = fit_answer(chat, prompt_tokens=len(prompt_ids), context_len=gateway.tokenizer.context_len)
    generation = GenerationRequest(
        prompt_ids=prompt_ids,
        choices=(sampling_params(chat, gateway),),
        max_tokens=max_tokens,
        eos_ids=gateway.tokenizer.eos_ids,
        request_id=record.request_id,
    )
    answer = Answer(
        gateway.tokenizer.detokenizer(prompt_ids),
        StopMatcher(chat.stop),
        eos_ids=gateway.tokenizer.eos_ids,
        max_tokens=max_tokens,
    )
    return ChatResponse(
        lambda: gateway.generator.generation(generation),
        answer,
        _identity(gateway),
        prompt_tokens=len(prompt_ids),
        stream=chat.stream,
        include_usage=chat.include_usage,
        limits=gateway.stream_limits,
        record=record,
        clock=gateway.clock,
    )


async def tokenize(chat: ChatRequest, tokenizer: ChatTokenizer, *, size: int) -> tuple[int, ...]:
    """The prompt's ids.

    Raises:
        ApiError: 400 `context_length_exceeded` when the prompt's size alone tells that it does not fit, or what
            the template does not take; 429.
    """
    try:
        return await tokenizer.prompt_ids(chat.messages, size=size)
    except PromptTooLong as error:
        raise context_length_exceeded(
            context_len=tokenizer.context_len,
            prompt_tokens=error.tokens_min,
            max_tokens=chat.max_tokens,
            param=chat.max_tokens_param,
            at_least=True,
        ) from error


def fit_answer(chat: ChatRequest, *, prompt_tokens: int, context_len: int) -> int:
    """How many tokens the answer may have: what was asked for, or the rest of the window.

    Raises:
        ApiError: 400 `context_length_exceeded` when prompt and answer do not fit together.
    """
    room = context_len - prompt_tokens
    if room < (chat.max_tokens or 1):
        raise context_length_exceeded(
            context_len=context_len,
            prompt_tokens=prompt_tokens,
            max_tokens=chat.max_tokens,
            param=chat.max_tokens_param,
        )
    return chat.max_tokens or room


def sampling_params(chat: ChatRequest, gateway: GatewayState) -> SamplingParams:
    """What the last hop samples with: the caller's values, else the model's defaults, else the API's."""
    defaults = gateway.tokenizer.sampling_defaults
    temperature = defaults.get("temperature", 1.0) if chat.temperature is None else chat.temperature
    top_p = defaults.get("top_p", 1.0) if chat.top_p is None else chat.top_p
    seed = gateway.random_seed() if chat.seed is None else wire_seed(chat.seed)
    return SamplingParams(temperature=0.0 if temperature < GREEDY_BELOW else temperature, top_p=top_p, seed=seed)


def wire_seed(seed: int) -> int:
    """A 64-bit seed as one that the wire carries: itself where it fits, else a hash of it."""
    if 0 <= seed < 2**SEED_BITS:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def _identity(gateway: GatewayState) -> CompletionIdentity:
    return CompletionIdentity(
        completion_id=f"chatcmpl-{secrets.token_hex(14)}",
        created=int(gateway.unix_time()),
        model=gateway.model.name,
        fingerprint=f"fp_{gateway.model.fingerprint}",
    )


def _shown(names: tuple[str, ...]) -> list[str]:
    return [name[:64] for name in names[:UNKNOWN_LOGGED_MAX]]
