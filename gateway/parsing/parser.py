"""The interface of every parser of model output."""

from __future__ import annotations

from typing import Protocol

from gateway.parsing.events import Content, Event


class OutputParser(Protocol):
    """Turns the text of one answer into events, however the text is cut into pieces.

    Joined over all calls, the events depend on the whole text only. A parser never raises for what a
    model wrote, and holds back only what it cannot yet tell apart.
    """

    @property
    def special_tokens(self) -> frozenset[str]:
        """Special tokens whose text must reach `push`; the caller leaves out all others."""

    def push(self, text: str) -> list[Event]:
        """Take more of the answer's text, any number of characters, and return what it settled."""

    def finish(self) -> list[Event]:
        """Return what was held back. Call once, at the end; `push` must not follow.

        A call the model did not finish keeps the arguments given so far, which are then no complete
        JSON object; one that was cut off before its name was known is left out.
        """


class PlainParser:
    """Everything is content."""

    special_tokens: frozenset[str] = frozenset()

    def push(self, text: str) -> list[Event]:
        """The text, as content."""
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """Nothing was held back."""
        return []
