"""Messages: every form that clients send, brought into the one that templates read."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.openai_errors import ApiError
from gateway.openai_messages import MESSAGES_MAX, read_messages


def refused_path(*messages: Any) -> str | None:
    """The `param` of the refusal."""
    with pytest.raises(ApiError) as caught:
        read_messages(list(messages))
    assert caught.value.status == 400
    return caught.value.param


@pytest.mark.parametrize("role", ["developer", "system", "user", "assistant"])
def test_string_content_of_every_role(role: str):
    """Kept as it is."""
    assert read_messages([{"role": role, "content": "x\u2028"}]) == [{"role": role, "content": "x\u2028"}]


def test_text_parts_are_kept_in_order():
    """As text alone: what else a client hangs on them is dropped."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    assert read_messages([{"role": "user", "content": parts}])[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]


@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": None, "tool_calls": None, "refusal": None}])
def test_an_assistant_may_have_said_nothing(message: dict[str, Any]):
    """SDKs send null content back, and all the fields of their message objects."""
    assert read_messages([{"role": "assistant", **message}]) == [{"role": "assistant", "content": ""}]


def test_a_refusal_is_what_the_assistant_said():
    """As a field and as a part."""
    (field,) = read_messages([{"role": "assistant", "content": None, "refusal": "no"}])
    (part,) = read_messages([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}])
    assert (field["content"], part["content"]) == ("no", [{"type": "text", "text": "no"}])


def test_tool_calls_of_a_history_are_decoded():
    """Templates expect mappings where the API has JSON strings; an empty string is no arguments."""
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}},
    ]
    history = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    assistant, tool = read_messages(history)
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"a": 1}, {}]
    assert tool == {"role": "tool", "content": "done", "tool_call_id": "1"}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_that_is_sent_back_reaches_the_template_under_one_name(name: str):
    """Servers use either."""
    (message,) = read_messages([{"role": "assistant", "content": "x", name: "hm"}])
    assert message == {"role": "assistant", "content": "x", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (1, "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "function", "content": "x"}, "messages[0].name"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": "x", "name": 1}, "messages[0].name"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "refusal": 1}, "messages[0].content"),
        ({"role": "assistant", "content": "x", "function_call": {}}, "messages[0].function_call.name"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "messages[0].audio"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": '}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_by_path(message: object, path: str):
    """The caller is told which of many messages, and where in it."""
    assert refused_path(message) == path


def test_there_is_a_limit_to_messages():
    """Beyond it nothing could fit anyway."""
    with pytest.raises(ApiError, match="at most"):
        read_messages([{"role": "user", "content": ""}] * (MESSAGES_MAX + 1))
