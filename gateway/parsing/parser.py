"""The interface of parsers, and the one that finds nothing."""

from __future__ import annotations

from typing import Protocol

from gateway.parsing.events import Content, Event


class OutputParser(Protocol):
    """Reads one answer's text as it comes, in whatever pieces."""

    special_tokens: frozenset[str]
    """Special tokens whose text the parser needs to see; all others are stripped before."""

    def push(self, text: str) -> list[Event]:
        """Take the next text, which may end within a marker, and return what is certain now."""
        ...

    def finish(self) -> list[Event]:
        """The text has ended: return what was held back."""
        ...


class PlainParser:
    """Everything is content."""

    special_tokens: frozenset[str] = frozenset()

    def push(self, text: str) -> list[Event]:
        """The text, as content."""
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """Nothing was held back."""
        return []
