"""Parsers of model output: the same events for every cut, and nothing raised, lost or given too early."""

from __future__ import annotations

import json
import random

import pytest
from canitoolcall.fixtures import Fixture, load_fixtures
from canitoolcall.pytest_plugin import family_for
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.parsing.events import Content, Event, ToolCallArguments, ToolCallBegin
from gateway.parsing.families import FAMILIES, create_parser
from gateway.parsing.grammar import Grammar
from tests.support.parser_conformance import families_of, prompt_tail_of
from tests.support.parser_events import WEATHER, events_of, random_pieces

HELD_CHARS_MAX = 600
"""More than any marker, name and run of white space together; no test's text has longer ones."""

LONG_CHARS = 10_000
"""Far more than may be held back."""

FIXTURES = load_fixtures()
MARKED = sorted(name for name, family in FAMILIES.items() if family.create_tool_parser)
PASSING = [
    *[(name, None) for name in MARKED],
    ("kimi_k3", "kimi_k3"),
    ("hermes", "think"),
    ("qwen3_xml", "think"),
    ("gemma4", "gemma4"),
]
"""Families whose text needs no markers; harmony's is all messages."""


def events_of_fixture(fixture: Fixture, text: str, pieces: list[str], *, whole_calls: bool) -> list[Event]:
    """Return the events of a text of a fixture's model, with the fixture's tools."""
    tools, reasoning = families_of(fixture.reference_model)
    parser = create_parser(
        tool_family=tools,
        reasoning_family=reasoning,
        tools=fixture.tools,
        prompt_tail=prompt_tail_of(fixture, family_for(fixture)),
        whole_calls=whole_calls,
    )
    return events_of(parser, pieces or [text])


def arguments_of(events: list[Event]) -> dict[int, str]:
    """Return the joined arguments of each call."""
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolCallBegin):
            assert event.index == len(arguments)
            arguments[event.index] = ""
        elif isinstance(event, ToolCallArguments):
            assert event.index == len(arguments) - 1
            arguments[event.index] += event.text
    return arguments


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32), chars_max=st.sampled_from([1, 3, 16, 64]), whole_calls=st.booleans())
def test_every_fixture_gives_the_same_events_in_every_cut(seed: int, chars_max: int, whole_calls: bool):
    """Where the text was cut can never be told from what comes out."""
    rng = random.Random(seed)
    for fixture in FIXTURES:
        text = fixture.raw_output
        pieces = random_pieces(text, rng, chars_max)
        assert events_of_fixture(fixture, text, pieces, whole_calls=whole_calls) == events_of_fixture(
            fixture, text, [], whole_calls=whole_calls
        ), fixture.id


@st.composite
def spoiled_outputs(draw: st.DrawFn) -> tuple[Fixture, str]:
    """Return a fixture and its output with parts left out, repeated, or taken from another's."""
    fixture, other = draw(st.sampled_from(FIXTURES)), draw(st.sampled_from(FIXTURES)).raw_output
    text = fixture.raw_output[:1000]
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 16)))
        place = draw(st.integers(0, len(other)))
        text = text[:start] + draw(st.sampled_from(["", text[start:end] * 2, other[place : place + 24]])) + text[end:]
    return fixture, text


@given(spoiled=spoiled_outputs(), whole_calls=st.booleans(), seed=st.integers(0, 2**32))
def test_spoiled_outputs_never_raise_and_never_depend_on_the_cut(
    spoiled: tuple[Fixture, str], whole_calls: bool, seed: int
):
    """Whatever a model writes, the answer goes on, and whole calls have JSON objects as arguments."""
    fixture, text = spoiled
    events = events_of_fixture(fixture, text, [text], whole_calls=whole_calls)
    for pieces in (list(text), random_pieces(text, random.Random(seed))):
        assert events_of_fixture(fixture, text, pieces, whole_calls=whole_calls) == events
    for arguments in arguments_of(events).values():
        if whole_calls:
            assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(("tools", "reasoning"), PASSING)
@settings(max_examples=30)
@given(text=st.text(alphabet="ab<>[]{}|\"' \n=:/", max_size=60))
def test_text_without_a_marker_is_content_to_the_character(tools: str, reasoning: str | None, text: str):
    """Ordinary text passes unchanged, brackets and all; so short an alphabet spells no marker."""
    parser = create_parser(tool_family=tools, reasoning_family=reasoning, tools=[WEATHER], prompt_tail="")
    assert events_of(parser, text) == ([Content(text)] if text else [])


def longest_hold(parser: Grammar, text: str) -> int:
    """Return how many characters a parser ever kept when a text came one by one."""
    held = 0
    for char in text:
        parser.push(char)
        held = max(held, parser.source.held_chars)
    return held


@pytest.mark.parametrize("family", MARKED)
@pytest.mark.parametrize("text", ["prose with <tags>, [lists] and {braces}. ", " ", "<", "{", "[", "\n"])
def test_little_is_held_back_of_long_prose(family: str, text: str):
    """What is kept does not grow with the answer, so neither does the time for a character."""
    create = FAMILIES[family].create_tool_parser
    assert create is not None
    parser = create([WEATHER])
    assert isinstance(parser, Grammar)
    assert longest_hold(parser, "x" + text * (LONG_CHARS // len(text))) <= HELD_CHARS_MAX


@pytest.mark.parametrize(
    ("family", "before"),
    [
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "'),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "'),
        ("pythonic", "[get_weather(city='"),
        ("glm", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>"),
        ("qwen3_xml", "<tool_call><function=get_weather><parameter=city>"),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>'),
        ("minimax", '<minimax:tool_call><invoke name="get_weather"><parameter name="city">'),
    ],
)
def test_little_is_held_back_of_long_arguments(family: str, before: str):
    """An argument of any length passes as it arrives."""
    create = FAMILIES[family].create_tool_parser
    assert create is not None
    parser = create([WEATHER])
    assert isinstance(parser, Grammar)
    assert longest_hold(parser, before + "some text, (brackets) <and> all. " * 300) <= HELD_CHARS_MAX
