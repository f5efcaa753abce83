"""How the choices of a completion's prompt are drawn, and which tokens end them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from gateway.chat_request import SamplingAsked
from gateway.openai_errors import invalid_value
from gateway.state import GatewayState
from gateway.tokenizer import ChatTokenizer
from gateway.turn import sampling_params, wire_seed
from shared.messages import SamplingParams


def end_ids(asked: SamplingAsked, tokenizer: ChatTokenizer) -> frozenset[int]:
    """Tokens that end an answer: the model's own unless they are to be ignored, and the caller's."""
    own: Collection[int] = () if asked.ignore_eos else tokenizer.eos_ids
    return frozenset(own).union(asked.stop_token_ids)


def choice_params(
    asked: SamplingAsked, gateway: GatewayState, *, choices: int, logprobs: int | None
) -> list[SamplingParams]:
    """What the last hop draws each choice with; they differ in their seeds alone.

    Only what a caller asks for differs from its default: nodes of an older version can serve all other calls.

    Raises:
        ApiError: 400 for an id that is no token of this model.
    """
    _check_ids(asked, gateway.tokenizer)
    params = replace(
        sampling_params(asked, gateway),
        allowed_ids=asked.allowed_token_ids,
        min_tokens=asked.min_tokens,
        end_ids=tuple(sorted(end_ids(asked, gateway.tokenizer))) if asked.min_tokens else (),
        logit_bias=asked.logit_bias,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        min_p=asked.min_p or 0.0,
        top_k=asked.top_k or 0,
        logprobs=logprobs,
    )
    return [replace(params, seed=wire_seed(params.seed + choice)) for choice in range(choices)]


def for_prompt(params: SamplingParams, prompt_tokens: int) -> SamplingParams:
    """The same with the length of the prompt, where the answer's own tokens count."""
    counts_answer = params.min_tokens or params.frequency_penalty or params.presence_penalty
    return replace(params, prompt_len=prompt_tokens) if counts_answer else params


def _check_ids(asked: SamplingAsked, tokenizer: ChatTokenizer) -> None:
    named: dict[str, Iterable[int]] = {
        "logit_bias": (token_id for token_id, _ in asked.logit_bias),
        "allowed_token_ids": asked.allowed_token_ids,
        "stop_token_ids": asked.stop_token_ids,
    }
    for name, ids in named.items():
        for token_id in ids:
            if token_id >= tokenizer.ids_end:
                raise invalid_value(name, f"{token_id} is no token id: they are from 0 to {tokenizer.ids_end - 1}")
