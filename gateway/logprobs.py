"""Log-probabilities as callers see them: token text, true bytes, and the likeliest alternatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.generation_request import TokenLogprobs

LOGPROB_MIN = -9999.0
"""What JSON, which knows no infinity, is told of a token that cannot come; as vLLM has it."""

Spell = Callable[[int], tuple[str, bytes]]
"""A token's text, with U+FFFD where it is no whole character, and its own bytes."""


@dataclass(frozen=True, slots=True)
class Spelled:
    """One token with its log-probability."""

    token_id: int
    text: str
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """A token of an answer, or of a scored prompt, and what might have stood in its place."""

    token: Spelled
    top: tuple[Spelled, ...]


def logprob_entry(token_id: int, logprobs: TokenLogprobs, spell: Spell) -> LogprobEntry:
    """Spell out a token and its alternatives."""
    top = tuple(_spelled(other, logprob, spell) for other, logprob in logprobs.top)
    return LogprobEntry(_spelled(token_id, logprobs.logprob, spell), top)


def _spelled(token_id: int, logprob: float, spell: Spell) -> Spelled:
    text, data = spell(token_id)
    return Spelled(token_id, text, data, max(logprob, LOGPROB_MIN))
