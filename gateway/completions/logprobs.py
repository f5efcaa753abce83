r"""Log-probabilities as completions write them: four lists, one place for each token.

A token's text is its key among the alternatives, so a token that is no whole character is spelled by its bytes
(``bytes:\xe4\xbd``). The token that stands there is always among its alternatives, with the same number:
callers tell from the largest of them whether it was the likeliest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.detokenizer import Detokenizer
from gateway.generation_request import PromptScores
from gateway.logprobs import LogprobEntry, Spell, logprob_entry

LOGPROB_MIN = -9999.0
"""Stands for minus infinity, which JSON does not have; as in vLLM."""


@dataclass(frozen=True, slots=True)
class LogprobRow:
    """One token.

    Args:
        token: Its text, or its bytes spelled out.
        logprob: None for a prompt's first token, which nothing predicts.
        top: The likeliest tokens at its place and the token itself; None likewise.
        offset: Where it begins in its choice's text, in characters.
    """

    token: str
    logprob: float | None
    top: dict[str, float] | None
    offset: int


class TextOffsets:
    """Where each token of a text begins.

    Args:
        detokenizer: Fresh.
        start: Characters that stand before.
    """

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._offset = start

    def push(self, token_id: int) -> int:
        """The place of the next token: after all whole characters that the tokens before it made."""
        offset = self._offset
        self._offset += len(self._detokenizer.push(token_id))
        return offset


def answer_row(entry: LogprobEntry, offset: int) -> LogprobRow:
    """A generated token."""
    top: dict[str, float] = {}
    for spelled in (entry.token, *entry.top):
        text = token_text(spelled.text, spelled.data)
        top[text] = max(spelled.logprob, top.get(text, LOGPROB_MIN))  # two tokens may read the same
    logprob = max(entry.token.logprob, LOGPROB_MIN)
    return LogprobRow(token_text(entry.token.text, entry.token.data), logprob, top, offset)


def prompt_rows(ids: Sequence[int], offsets: Sequence[int], scores: PromptScores, spell: Spell) -> list[LogprobRow]:
    """A scored prompt.

    Raises:
        ValueError: If not all of it was scored.
    """
    rows = []
    for token_id, offset, score in zip(ids, offsets, scores.tokens, strict=True):
        if score is None:
            rows.append(LogprobRow(token_text(*spell(token_id)), None, None, offset))
        else:
            rows.append(answer_row(logprob_entry(token_id, score, spell), offset))
    return rows


def rows_json(rows: Iterable[LogprobRow]) -> dict[str, object]:
    """As the API writes them."""
    rows = list(rows)
    return {
        "tokens": [row.token for row in rows],
        "token_logprobs": [row.logprob for row in rows],
        "top_logprobs": [row.top for row in rows],
        "text_offset": [row.offset for row in rows],
    }


def mean_logprob(entries: Sequence[LogprobEntry]) -> float:
    """Per token, so that a long answer is not worse for its length; 0 for none."""
    return sum(entry.token.logprob for entry in entries) / len(entries) if entries else 0.0


def token_text(text: str, data: bytes) -> str:
    """A token's text, or its bytes where they are no whole characters."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text
