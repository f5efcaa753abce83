"""Writes a Lark grammar rule by rule, with markers matched as the model's vocabulary has them.

A marker that is a single token of the vocabulary is matched by its id, so that the text before it cannot swallow
it and it cannot be spelled out; any other is matched as text, lazily.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.grammar import Piece, compile_pieces, quote

REPEATS_MAX = 128
"""Calls that an answer may be made to hold: what SDKs read."""
MAYBE_NEWLINE: Final = "\n?"
"""Among literals: a line break that may be left out."""

TokenId = Callable[[str], int | None]
"""The id of a text that is one added token; None for others."""
Parts = list[str]
"""What stands one behind the other in a rule."""


class GrammarWriter:
    """Rules and pieces of one grammar.

    Args:
        token_id: Of the model's vocabulary.
    """

    def __init__(self, token_id: TokenId) -> None:
        self._token_id = token_id
        self._rules = {"TEXT": "TEXT: /(.|\\n)*/", "SPACE": "SPACE: /[ \\n]{0,4}/"}
        self._pieces: list[Piece] = []

    def literals(self, *texts: str) -> Parts:
        """These texts; one that is a token as a whole is that token."""
        return [self._literal(text) for text in texts if text]

    def until(self, marker: str, *rest: str) -> Parts:
        """Any text up to a marker, the marker, and further literals."""
        if self._token_id(marker) is not None:
            return ["TEXT", *self.literals(marker, *rest)]
        name = f"until_{len(self._rules)}"
        self._rules[name] = f"{name}[lazy]: /(.|\\n)*/ {quote(marker)}"
        return [name, *self.literals(*rest)]

    def add_rule(self, name: str, *alternatives: Parts) -> Parts:
        """A rule of this name; returns what refers to it."""
        self._rules[name] = f"{name}: {' | '.join(' '.join(parts) for parts in alternatives)}"
        return [name]

    def add_piece(self, piece: Piece) -> Parts:
        """A grammar of its own; returns what refers to it."""
        self._pieces.append(piece)
        return [f"@{piece.name}"]

    def compiled(self, start: Parts, param: str) -> str:
        """The whole grammar.

        Args:
            start: What an answer is.
            param: What the caller gave, for messages.

        Raises:
            ApiError: 400, as `compile_pieces`.
        """
        rules = "\n".join(["start: " + " ".join(start), *self._rules.values()])
        return compile_pieces([Piece(name="answer", lark=rules), *self._pieces], param)

    def _literal(self, text: str) -> str:
        if text == MAYBE_NEWLINE:
            return '"\\n"?'
        token_id = self._token_id(text)
        return quote(text) if token_id is None else f"<[{token_id}]>"


def repeated(item: Parts, separator: Parts) -> Parts:
    """One or more."""
    return [*item, "(", *separator, *item, f"){{0,{REPEATS_MAX - 1}}}"]


def either(*alternatives: Parts) -> Parts:
    """One of them."""
    return ["(", " | ".join(" ".join(parts) for parts in alternatives), ")"]


def optional(parts: Parts) -> Parts:
    """Or nothing."""
    return ["(", *parts, ")?"]
