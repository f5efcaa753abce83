"""Anthropic's messages: what a chat template sees of them."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.messages.conversation import read_conversation
from gateway.openai_errors import ApiError

USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "42"}


def read(*messages: Any, **body: Any) -> list[dict[str, Any]]:
    """What a template sees."""
    return read_conversation({"messages": list(messages), **body})


def test_strings_and_texts_are_the_same():
    """As Anthropic says of them."""
    short = read({"role": "user", "content": "hi"}, system="be kind")
    system = [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]
    assert short == read({"role": "user", "content": [{"type": "text", "text": "hi"}]}, system=system)
    assert short == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]


def test_neighbours_of_one_role_are_one_turn():
    """Templates that want turns to alternate would refuse them."""
    seen = read(
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
    )
    assert [message["content"] for message in seen] == ["a\nb", "c\nd"]


def test_a_turn_with_tools():
    """Thinking, words and uses are one message, each result one of its own, the user's words after them another."""
    seen = read(
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "wait"},
                USE,
                {**USE, "id": "t2", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                RESULT,
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no"}],
                },
                {"type": "text", "text": "so?"},
            ],
        },
    )
    assert [message["role"] for message in seen] == ["user", "assistant", "tool", "tool", "user"]
    assert (seen[1]["reasoning_content"], seen[1]["content"]) == ("hm", "wait")
    assert [call["function"]["arguments"] for call in seen[1]["tool_calls"]] == [{"a": 1}, {}]
    assert seen[2] == {"role": "tool", "tool_call_id": "t1", "name": "f", "content": "42"}
    assert seen[3]["content"] == "Error: no"


def test_a_result_may_be_empty():
    """A tool that says nothing has still run."""
    seen = read({"role": "assistant", "content": [USE]}, {"role": "user", "content": [{**RESULT, "content": None}]})
    assert seen[1]["content"] == ""


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([1], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [USE]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "content": [RESULT]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [RESULT]}], "messages[0].content[0].tool_use_id"),
        ([{"role": "assistant", "content": [{**USE, "input": "x"}]}], "messages[0].content[0].input"),
        ([{"role": "assistant", "content": [{**USE, "name": ""}]}], "messages[0].content[0].name"),
        ([{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}], "messages[0].content[0]"),
        (
            [
                {"role": "assistant", "content": [USE]},
                {"role": "user", "content": [{**RESULT, "content": [{"type": "document"}]}]},
            ],
            "messages[1].content[0].content[0].type",
        ),
    ],
)
def test_what_is_wrong_is_named(messages: list[Any], param: str):
    """By its path."""
    with pytest.raises(ApiError) as raised:
        read(*messages)
    assert (raised.value.status, raised.value.param) == (400, param)


@pytest.mark.parametrize("messages", [None, {}, "hi"])
def test_messages_must_be_an_array(messages: Any):
    """And be there."""
    with pytest.raises(ApiError) as raised:
        read_conversation({"messages": messages})
    assert raised.value.param == "messages"
