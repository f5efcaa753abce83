"""transformers' response parser behind our interface."""

from __future__ import annotations

import pytest
from transformers.utils.chat_parsing import ResponseParser

from gateway.parsing.events import Content, Event, Reasoning
from gateway.parsing.response_template import ResponseTemplateParser
from tests.support.parser_events import call, events_of

TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}
PROMPT = "<|im_start|>assistant\n"
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def parse(text: str, prompt: str = PROMPT) -> list[Event]:
    """Return the events of a text, the same whole and character by character."""

    def create() -> ResponseTemplateParser:
        return ResponseTemplateParser(ResponseParser(TEMPLATE, prefix=prompt), frozenset({"<think>"}))

    events = events_of(create(), [text])
    assert events_of(create(), text) == events
    return events


def test_regions_become_events():
    """Thinking is reasoning, a region of tool calls a call with its arguments as JSON."""
    assert parse(f"<think>Why?</think>So.{CALL}{CALL}") == [
        Reasoning("Why?"),
        Content("So."),
        *call("f", '{"a": 1}'),
        *call("f", '{"a": 1}', index=1),
    ]


def test_the_prompt_may_have_opened_the_reasoning():
    """The response parser reads the prompt first."""
    assert parse("Why?</think>So.", prompt=PROMPT + "<think>") == [Reasoning("Why?"), Content("So.")]


def test_a_call_it_cannot_read_is_content_and_so_is_the_rest():
    """What raises in transformers must not end the answer."""
    assert parse("Hi<tool_call>{bad}</tool_call> more") == [Content("Hi{bad} more")]


@pytest.mark.parametrize("text", ['<tool_call>{"name": "f"', "<tool_call>"])
def test_a_call_that_breaks_off_is_left_out(text: str):
    """A call is given only when it has ended."""
    assert parse(text) == []


def test_special_tokens_are_the_callers():
    """Which tokens a template is made of is known where the tokenizer is."""
    assert ResponseTemplateParser(ResponseParser(TEMPLATE, prefix=""), frozenset({"<x>"})).special_tokens == {"<x>"}
