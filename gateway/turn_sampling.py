"""What the last hop samples with, made from what a caller asks, what the model recommends, and what the API says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from gateway.chat_request import SamplingAsked
from gateway.openai_errors import invalid_value
from gateway.state import SEED_BITS
from shared.messages import SamplingParams

GREEDY_BELOW = 1e-5
"""Dividing logits by less overflows; the limit they tend to is the greedy choice."""
BAN_BIAS = -100.0
"""OpenAI's lowest bias, which it says should ban the token; here it does."""


def sampling_params(
    asked: SamplingAsked,
    *,
    defaults: Mapping[str, float],
    seed: int,
    prompt_len: int,
    end_ids: frozenset[int],
    grammar: str = "",
    logprobs: int | None = None,
) -> SamplingParams:
    """How one choice is drawn.

    Args:
        asked: The caller's values.
        defaults: The model's.
        seed: Of this choice.
        prompt_len: Tokens of the prompt.
        end_ids: What ends the answer.
        grammar: What it must match.
        logprobs: How many alternatives are returned; None for no log-probabilities.

    Raises:
        ApiError: 400: see `check_drawable`.
    """

    def chosen(value: float | None, name: str, otherwise: float) -> float:
        return defaults.get(name, otherwise) if value is None else value

    temperature = chosen(asked.temperature, "temperature", 1.0)
    needs_ends = bool(grammar) or bool(asked.min_tokens)
    params = SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=chosen(asked.top_p, "top_p", 1.0),
        top_k=int(chosen(asked.top_k, "top_k", 0)),
        min_p=chosen(asked.min_p, "min_p", 0.0),
        repetition_penalty=chosen(asked.repetition_penalty, "repetition_penalty", 1.0),
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        seed=seed,
        grammar=grammar,
        allowed_ids=asked.allowed_token_ids,
        banned_ids=tuple(token_id for token_id, bias in asked.logit_bias if bias <= BAN_BIAS),
        logit_bias=tuple((token_id, bias) for token_id, bias in asked.logit_bias if bias > BAN_BIAS and bias),
        min_tokens=asked.min_tokens,
        end_ids=tuple(sorted(end_ids)) if needs_ends else (),
        logprobs=logprobs,
    )
    check_drawable(params)
    return replace(params, prompt_len=prompt_len) if params.needs_history else params


def check_drawable(params: SamplingParams) -> None:
    """Check that something may be drawn at first, as far as ids alone tell.

    Raises:
        ApiError: 400 that names what excludes each other.
    """
    ruled_out = {*params.banned_ids, *(params.end_ids if params.min_tokens else ())}
    if params.allowed_ids and ruled_out.issuperset(params.allowed_ids):
        reason = "logit_bias of -100, or min_tokens with the tokens that end an answer, rule all of them out"
        raise invalid_value("allowed_token_ids", reason)


def choice_seeds(seed: int, choices: int) -> list[int]:
    """A seed for each choice: the first one's is the call's own, so that `n` does not change it."""
    return [seed, *(_hashed(f"{seed}:{choice}".encode()) for choice in range(1, choices))]


def wire_seed(seed: int) -> int:
    """A 64-bit seed as one that the wire carries: itself where it fits, else a hash of it."""
    return seed if 0 <= seed < 2**SEED_BITS else _hashed(seed.to_bytes(8, "little", signed=True))


def _hashed(data: bytes) -> int:
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def end_ids(asked: SamplingAsked, eos_ids: frozenset[int]) -> frozenset[int]:
    """What ends an answer: the model's own ends, unless they are ignored, and the caller's."""
    return frozenset(asked.stop_token_ids) | (frozenset() if asked.ignore_eos else eos_ids)


def check_vocabulary(asked: SamplingAsked, ids_end: int) -> None:
    """Check that every id named is a token of the model.

    Raises:
        ApiError: 400 that names the parameter and the id.
    """
    named = {
        "logit_bias": [token_id for token_id, _ in asked.logit_bias],
        "allowed_token_ids": asked.allowed_token_ids,
        "stop_token_ids": asked.stop_token_ids,
    }
    for param, ids in named.items():
        for token_id in ids:
            if token_id >= ids_end:
                raise invalid_value(param, f"{token_id} is no token id: they are from 0 to {ids_end - 1}")
