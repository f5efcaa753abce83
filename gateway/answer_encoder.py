"""How answers become bytes: what every endpoint's encoder gives to `gateway.answer_response`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.answer import Answer, Piece
from gateway.generation_request import PromptScores
from gateway.openai_errors import ApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one call. `completion_tokens` counts every token generated, an end-of-turn token too.

    Args:
        prompt_tokens: Counted once, however many choices there are.
        completion_tokens: Of all choices together.
        reasoning_tokens: Of these, how many the model said to itself.
        cached_tokens: Of the prompt's, how many were not computed anew.
    """

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int = 0


class AnswerEncoder(Protocol):
    """Writes one response, whole or as a stream. One encoder serves one call.

    A stream's calls come in this order: `begin`, then `piece` and, once per choice, `finish` in any order over the
    choices, then `end`. First pieces of choices come in the order of the choices. `error` may take the place
    of anything after `begin`, and is the last. Each returns server-sent events, or nothing.
    """

    keep_alive: bytes
    """What is sent into a silence: a comment that no client shows."""
    works_in_threads: bool
    """Whether its methods touch only what they are given and what is its own, and so may run in any thread, one at a
    time."""
    prompt_tokens_shown: int
    """Tokens of prompts that the answer shows, counted once for each choice that shows them."""

    def begin(self, scores: PromptScores) -> bytes:
        """Before the first token, or before a silence is filled."""
        ...

    def piece(self, choice: int, piece: Piece) -> bytes:
        """What one token adds to a choice."""
        ...

    def finish(self, choice: int, answer: Answer) -> bytes:
        """A choice has ended."""
        ...

    def end(self, usage: Usage) -> bytes:
        """All have."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The stream cannot go on."""
        ...

    def whole(self, answers: Sequence[Answer], scores: PromptScores, usage: Usage) -> bytes:
        """The JSON body of a call that does not stream."""
        ...
