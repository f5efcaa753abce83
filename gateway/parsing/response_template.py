"""transformers' own response parser, where a tokenizer brings a response template for a format not known here.

It comes second, after this package's families: it gives a call only when the call has ended, its time grows
with the square of the answer's length, and it raises for a call it cannot read, with the text in hand lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from gateway.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from gateway.parsing.output import merged

REASONING_FIELDS = frozenset({"thinking", "reasoning", "reasoning_content"})
REFUSALS = (ValueError, TypeError, LookupError, RecursionError)  # what it raises for text it cannot read


class ResponseEvents(Protocol):
    """What `tokenizer.get_response_parser(prefix=…, tools=…)` returns."""

    initial_events: list[dict[str, Any]]

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Return the events of more text."""

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the message, and the events that were held back."""


class ResponseTemplateParser:
    """An `OutputParser` that has the text read by transformers.

    Text is handed over character by character, so that an exception costs no more than the call it is about,
    however the text was cut. A call that cannot be read is content, and so is all text after it; one that
    breaks off is left out.

    Args:
        responses: The response parser, which has read the prompt as its prefix.
        special_tokens: The special tokens that occur in the response template.
    """

    def __init__(self, responses: ResponseEvents, special_tokens: frozenset[str] = frozenset()) -> None:
        self.special_tokens = special_tokens
        self._responses: ResponseEvents | None = responses
        self._calls = 0
        self._unread = ""  # of a call that has not ended

    def push(self, text: str) -> list[Event]:
        """Take more text; see `OutputParser`."""
        events: list[Event] = []
        for position, char in enumerate(text):
            if self._responses is None:
                events.append(Content(text[position:]))
                break
            try:
                events += self._translated(self._responses.feed(char))
            except REFUSALS:
                self._responses = None
                events += [Content(self._unread)] if self._unread else []
        return merged(events)

    def finish(self) -> list[Event]:
        """Return what was held back; see `OutputParser`."""
        if self._responses is None:
            return []
        try:
            _, events = self._responses.finalize()
            return merged(list(self._translated(events)))
        except REFUSALS:
            return []

    def _translated(self, events: list[dict[str, Any]]) -> Iterator[Event]:
        for event in events:
            kind, field, text = event["type"], event.get("field"), event.get("text", "")
            if kind == "region_chunk" and event.get("dirty"):
                self._unread += text
            elif kind == "region_chunk" and field in REASONING_FIELDS:
                yield Reasoning(text)
            elif kind == "region_chunk" and field == "content":
                yield Content(text)
            elif kind == "region_close":
                self._unread = ""
                if field == "tool_calls":
                    yield from self._call_events(event["value"])

    def _call_events(self, value: object) -> Iterator[Event]:
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function", call) if isinstance(call, Mapping) else {}
            arguments = function.get("arguments", {})
            if not isinstance(function.get("name"), str) or not isinstance(arguments, Mapping):
                raise TypeError("the response template makes no calls of its regions")
            yield ToolCallBegin(self._calls, function["name"], None)
            yield ToolCallArguments(self._calls, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
            self._calls += 1
