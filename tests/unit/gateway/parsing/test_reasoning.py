"""Reasoning told from the rest."""

from __future__ import annotations

import pytest

from gateway.parsing.events import Content, Event, Reasoning
from gateway.parsing.families import FAMILIES
from tests.support.parser_events import call, events_of, parse

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "prompt", "events"),
    [
        ("<think>\nWhy?\n</think>\n\nSo.", "", [Reasoning("Why?"), Content("So.")]),
        ("\n<think>Why?</think>So.", "", [Reasoning("Why?"), Content("So.")]),
        ("Why?\n</think>\n\nSo.", "<think>\n", [Reasoning("Why?"), Content("So.")]),
        ("<think>Why?</think>So.", "<think>\n", [Reasoning("Why?"), Content("So.")]),
        ("So.", "<think>\n\n</think>\n\n", [Content("So.")]),
        ("Why?", "<think>", [Reasoning("Why?")]),
        ("<think>Why? ", "", [Reasoning("Why? ")]),
        ("</think>So.", "<think>", [Content("So.")]),
        ("So <think> is text </think>.", "", [Content("So <think> is text </think>.")]),
        ("<thin", "", [Content("<thin")]),
        ("", "<think>", []),
    ],
)
def test_thinking_in_tags(text: str, prompt: str, events: list[Event]):
    """The opening tag is in the output, or in the prompt; the closing one may be missing."""
    assert parse(text, reasoning="think", prompt=prompt) == events


@pytest.mark.parametrize(
    ("family", "text", "events"),
    [
        ("mistral_think", "[THINK] Why?[/THINK] So.", [Reasoning(" Why?"), Content(" So.")]),
        ("granite", "Here is my thought process: A. Here is my response: B.", [Reasoning("A."), Content("B.")]),
        ("gemma4", "<|channel>thought\nA.\n<channel|>B.", [Reasoning("A."), Content("B.")]),
        ("seed_oss", "<seed:think>A.</seed:think>B.", [Reasoning("A."), Content("B.")]),
        ("command_r", "<|START_THINKING|>A.<|END_THINKING|>B.", [Reasoning("A."), Content("B.")]),
    ],
)
def test_other_markers(family: str, text: str, events: list[Event]):
    """Each family has its own; Mistral's own no white space."""
    assert parse(text, reasoning=family) == events


def test_a_call_inside_reasoning_is_none():
    """A model that thinks about a call has not made it."""
    text = f"<think>Maybe {CALL}?</think>{CALL}"
    assert parse(text, tools="hermes", reasoning="think") == [
        Reasoning(f"Maybe {CALL}?"),
        *call("get_weather", "{}"),
    ]


def test_a_family_may_say_that_a_call_ends_the_reasoning():
    """Qwen3.5 starts calls without closing its thoughts; prose about the tag is none."""
    text = "See <tool_call>?\n<tool_call>\n<function=get_weather>\n</function>\n</tool_call>"
    assert parse(text, tools="qwen3_xml", reasoning="think", prompt="<think>\n") == [
        Reasoning("See <tool_call>?"),
        *call("get_weather", "{}"),
    ]


def test_a_family_makes_its_reasoning_parser():
    """The parser of reasoning alone leaves calls to another."""
    parser = FAMILIES["think"].create_reasoning_parser(prompt_ends_in_reasoning=True)
    assert events_of(parser, ["Why?</think>", CALL]) == [Reasoning("Why?"), Content(CALL)]
    with pytest.raises(ValueError, match="no reasoning"):
        FAMILIES["hermes"].create_reasoning_parser(prompt_ends_in_reasoning=False)
