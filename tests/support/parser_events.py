"""Runs a parser over a text, for tests that say what comes out."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.parsing.events import Event, ToolCallArguments, ToolCallBegin
from gateway.parsing.families import create_parser
from gateway.parsing.output import merged
from gateway.parsing.parser import OutputParser

WEATHER: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "wind": {"type": "boolean"},
                "note": {"type": ["string", "null"]},
                "filters": {"type": "object"},
            },
        },
    },
}
"""The tool offered in these tests."""


def events_of(parser: OutputParser, pieces: Iterable[str]) -> list[Event]:
    """Return the joined events of a text given in pieces."""
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    return merged(events + parser.finish())


def parse(
    text: str,
    *,
    tools: str | None = None,
    reasoning: str | None = None,
    prompt: str = "",
    whole_calls: bool = False,
    offered: Sequence[Mapping[str, Any]] = (WEATHER,),
) -> list[Event]:
    """Return the events of a text, after checking that they are the same when it comes character by character."""

    def create() -> OutputParser:
        return create_parser(
            tool_family=tools, reasoning_family=reasoning, tools=offered, prompt_tail=prompt, whole_calls=whole_calls
        )

    events = events_of(create(), [text])
    assert events_of(create(), text) == events
    return events


def call(name: str, arguments: str, *, index: int = 0, call_id: str | None = None) -> list[Event]:
    """Return the events of one call."""
    return [ToolCallBegin(index, name, call_id), ToolCallArguments(index, arguments)]


def random_pieces(text: str, rng: random.Random, chars_max: int = 16) -> list[str]:
    """Cut a text at random."""
    pieces = []
    while text:
        size = rng.randint(1, chars_max)
        pieces.append(text[:size])
        text = text[size:]
    return pieces
