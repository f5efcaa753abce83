"""A language model small enough to check by hand: what it thinks of a token depends on the token before it alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gateway.generation_request import GenerationRequest, PromptScores, Token, TokenLogprobs

VOCABULARY = 256
FIRST = 3
"""Ids before it are special."""


def likeliest(previous: int) -> int:
    """The token that follows."""
    return FIRST + (previous * 7 + 1) % VOCABULARY


def logprob(previous: int, token_id: int) -> float:
    """Of any token after another: exact in binary, so that sums are exact too."""
    return -0.125 if token_id == likeliest(previous) else -1.0 - (token_id % 16) / 16


def logprobs_after(previous: int, token_id: int, top: int) -> TokenLogprobs:
    """With the likeliest tokens, as the mesh gives them."""
    ids = sorted(range(FIRST, FIRST + VOCABULARY), key=lambda other: (-logprob(previous, other), other))[:top]
    return TokenLogprobs(logprob(previous, token_id), tuple((other, logprob(previous, other)) for other in ids))


def prompt_scores(request: GenerationRequest) -> PromptScores:
    """Of the whole prompt."""
    ids, top = request.prompt_ids, request.prompt_logprobs or 0
    return PromptScores([None, *[logprobs_after(previous, token_id, top) for previous, token_id in pairwise(ids)]])


def greedy(ids: Sequence[int], count: int) -> list[int]:
    """What follows."""
    answer: list[int] = []
    for _ in range(count):
        answer.append(likeliest([*ids, *answer][-1]))
    return answer


def answers(request: GenerationRequest) -> list[Token]:
    """Each choice is what the model says greedily, with log-probabilities if asked for."""
    answer = greedy(request.prompt_ids, request.max_tokens)
    tokens = []
    for position, token_id in enumerate(answer):
        previous = [*request.prompt_ids, *answer][len(request.prompt_ids) + position - 1]
        for choice, sampling in enumerate(request.choices):
            top = sampling.logprobs
            logprobs = None if top is None else logprobs_after(previous, token_id, top)
            tokens.append(Token(token_id, choice, logprobs))
    return tokens
