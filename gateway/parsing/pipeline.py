"""Parsers made of parsers."""

from __future__ import annotations

from gateway.parsing.events import Content, Event
from gateway.parsing.output import merged
from gateway.parsing.parser import OutputParser


class PassThrough:
    """A parser to which all text is content."""

    special_tokens: frozenset[str] = frozenset()

    def push(self, text: str) -> list[Event]:
        """Return the text."""
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """Return nothing: nothing is held back."""
        return []


class ReasoningThenTools:
    """Two parsers in a row: what the first calls content is the second's text.

    Args:
        reasoning: Tells reasoning from the rest.
        tools: Tells calls from content, in the rest only.
    """

    def __init__(self, reasoning: OutputParser, tools: OutputParser) -> None:
        self.special_tokens = reasoning.special_tokens | tools.special_tokens
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> list[Event]:
        """Take more text; see `OutputParser`."""
        return merged(self._pass_on(self._reasoning.push(text)))

    def finish(self) -> list[Event]:
        """Return what was held back; see `OutputParser`."""
        return merged(self._pass_on(self._reasoning.finish()) + self._tools.finish())

    def _pass_on(self, events: list[Event]) -> list[Event]:
        result: list[Event] = []
        for event in events:
            result += self._tools.push(event.text) if isinstance(event, Content) else [event]
        return result
