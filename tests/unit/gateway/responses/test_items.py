"""Input items: what is read, how it is stored, what a chat template sees of it."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from gateway.openai_errors import ApiError
from gateway.responses.conversation import to_messages
from gateway.responses.items import Item, read_input

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}


def read(*items: Any) -> list[Item]:
    """Read items that refer to nothing."""
    return read_input(list(items), lambda _item_id: None)


def messages(*items: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    """What a template sees."""
    return to_messages(read(*items), instructions)


def test_a_string_is_a_message_of_the_users():
    """The shortest input."""
    (item,) = read_input("hi", lambda _item_id: None)
    assert item["role"] == "user"
    assert to_messages([item], "be kind") == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    ]


def test_items_are_stored_as_the_sdk_reads_them():
    """Whatever form they came in."""
    items = read(
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        CALL,
        RESULT,
        {**RESULT, "output": [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}]},
    )
    for item in items:
        ITEM.validate_python(item, strict=True)
        assert item["id"]
        assert item["status"] == "completed"
    assert len({item["id"] for item in items}) == len(items)
    assert items[4]["id"] == "rs_1"


def test_reasoning_words_and_calls_are_one_turn():
    """As the model wrote them; a result ends the turn."""
    seen = messages(
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
        CALL,
        {**CALL, "call_id": "c2", "arguments": ""},
        RESULT,
        {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "x"}]},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "really"},
    )
    assert [message["role"] for message in seen] == ["user", "assistant", "tool", "tool", "assistant", "assistant"]
    assert seen[0]["content"] == "a\nb"
    turn = seen[1]
    assert (turn["reasoning_content"], turn["content"]) == ("hm", "wait")
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == [{"a": 1}, {}]
    assert seen[2] == {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "42"}


def test_reasoning_in_several_items_is_joined():
    """A summary stands for what is not there."""
    first = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]}
    second = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]}
    (turn,) = messages(first, second, {"role": "assistant", "content": "c"})
    assert (turn["reasoning_content"], turn["content"]) == ("a\nb", "c")


def test_a_call_that_was_cut_off_is_left_out():
    """No template could show half an object, and it must not poison what follows."""
    seen = messages({"role": "user", "content": "a"}, {**CALL, "arguments": '{"a', "status": "incomplete"})
    assert [message["role"] for message in seen] == ["user"]


def test_a_reference_is_replaced_by_its_item():
    """By id."""
    stored = read({"role": "user", "content": "hi"})[0]
    found = read_input([{"type": "item_reference", "id": stored["id"]}], {stored["id"]: stored}.get)
    assert found == [stored]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ({}, "input"),
        ([], "input"),
        ([1], "input[0]"),
        ([{}], "input[0].type"),
        ([{"type": "web_search_call"}], "input[0].type"),
        ([{"type": ["x"]}], "input[0].type"),
        ([{"role": "robot", "content": "x"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": 1}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{**CALL, "arguments": "{"}], "input[0].arguments"),
        ([{**CALL, "name": "a b"}], "input[0].name"),
        ([{**CALL, "call_id": None}], "input[0].call_id"),
        ([{**RESULT, "output": 1}], "input[0].output"),
        ([{"type": "item_reference", "id": "gone"}], "input[0].id"),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}], "input[0].encrypted_content"),
        ([{"type": "reasoning", "summary": [{}]}], "input[0].summary[0].text"),
    ],
)
def test_what_is_wrong_is_named(items: Any, param: str):
    """By its path."""
    with pytest.raises(ApiError) as raised:
        read_input(items, lambda _item_id: None)
    assert (raised.value.status, raised.value.param) == (400, param)


def test_a_result_needs_its_call():
    """It could not be told what it answers."""
    with pytest.raises(ApiError, match="no function call 'c1'"):
        messages(RESULT)
