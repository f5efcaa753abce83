"""Bodies of the Messages API: what is asked, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.messages.parameters import TABLE
from gateway.messages.schema import MessageRequest, read_message_request
from gateway.openai_errors import ApiError

TOOL = {"name": "f", "input_schema": {"type": "object"}}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}

KEYWORDS = st.sampled_from([
    "type", "role", "content", "text", "tool_use", "tool_result", "tool_use_id", "id", "name", "input", "thinking",
    "signature", "user", "assistant", "system", "custom", "auto", "any", "tool", "enabled", "adaptive",
    "budget_tokens", "input_schema", "format", "json_schema", "schema", "effort", "low", "f", "{}",
])  # fmt: skip


def read(*, counts_only: bool = False, **body: Any) -> MessageRequest:
    """Read the smallest body, and more."""
    data = json.dumps({"model": "m", "max_tokens": 5, "messages": [USER], **body}).encode()
    return read_message_request(data, counts_only=counts_only)


def test_the_smallest_body():
    """No thinking is asked for, nor shown."""
    asked = read()
    assert asked.chat.messages == [USER]
    assert asked.chat.answer.max_tokens == 5
    assert asked.chat.template.kwargs == {"enable_thinking": False}
    assert asked.chat.template.add_generation_prompt
    assert not asked.shows_thinking


def test_everything_that_is_asked_arrives():
    """In the chat request."""
    asked = read(
        system="s",
        stop_sequences=["a", "b", "a"],
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        stream=True,
        tools=[{**TOOL, "description": "d", "type": "custom", "strict": True}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "high", "format": SCHEMA},
        metadata={"user_id": "u"},
        new_thing=1,
    )
    chat = asked.chat
    assert (chat.answer.stop, chat.stream, chat.unknown) == (("a", "b"), True, ("new_thing",))
    assert (chat.sampling.temperature, chat.sampling.top_p, chat.sampling.top_k) == (0.5, 0.9, 4)
    assert (chat.tools.mode, chat.tools.parallel, chat.tools.allowed) == ("required", False, ())
    (tool,) = chat.tools.tools
    assert tool.strict
    assert tool.definition["function"] == {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert chat.template.kwargs == {"enable_thinking": True, "reasoning_effort": "high"}
    assert (chat.format.kind, chat.format.value) == ("json_schema", {"type": "object"})
    assert asked.shows_thinking


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", ())),
        ({"type": "none"}, ("none", ())),
        ({"type": "tool", "name": "f"}, ("required", ("f",))),
    ],
)
def test_the_choice_of_a_tool(choice: dict[str, str], expected: tuple[str, tuple[str, ...]]):
    """Under our words for it."""
    tools = read(tools=[TOOL], tool_choice=choice).chat.tools
    assert (tools.mode, tools.allowed) == expected


@pytest.mark.parametrize(
    ("thinking", "shown", "thinks"),
    [
        ({"type": "disabled"}, False, False),
        ({"type": "adaptive"}, True, True),
        ({"type": "adaptive", "display": "omitted"}, False, True),
    ],
)
def test_thinking(thinking: dict[str, str], shown: bool, thinks: bool):
    """Asked of the model, and shown unless omitted."""
    asked = read(thinking=thinking)
    assert (asked.shows_thinking, asked.chat.template.kwargs["enable_thinking"]) == (shown, thinks)


def test_a_last_message_of_the_assistant_s_is_continued():
    """But not after the use of a tool."""
    template = read(messages=[USER, {"role": "assistant", "content": "The"}]).chat.template
    assert (template.continue_final_message, template.add_generation_prompt) == (True, False)
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    template = read(messages=[USER, {"role": "assistant", "content": [use]}]).chat.template
    assert not template.continue_final_message


def test_counting_needs_no_limit():
    """Nothing is generated."""
    assert read(counts_only=True, max_tokens=None).chat.answer.max_tokens is None


def test_the_older_name_of_the_format():
    """As the SDK's beta sends it."""
    assert read(output_format=SCHEMA).chat.format.param == "output_format.schema"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"system": 1}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"metadata": "u"}, "metadata"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str):
    """A 400 whose message has the path of the parameter."""
    with pytest.raises(ApiError) as raised:
        read(**body)
    assert (raised.value.status, raised.value.param) == (400, param)
    assert f"'{param}'" in raised.value.message


@pytest.mark.parametrize("name", list(TABLE.refused))
def test_what_is_refused_is_named_unless_it_asks_for_nothing(name: str):
    """Null and neutral values pass."""
    for neutral in (None, *TABLE.refused[name].neutral):
        read(**{name: neutral})
    with pytest.raises(ApiError) as raised:
        read(**{name: {"some": "value"}})
    assert (raised.value.param, raised.value.code) == (name, "unsupported_parameter")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-3, 3) | st.text(max_size=3) | KEYWORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted({*TABLE.honoured, *TABLE.harmless, *TABLE.refused})), JSON))
def test_any_value_for_any_parameter_is_read_or_refused(body: dict[str, Any]):
    """Nothing else comes out of bytes."""
    try:
        read(**body)
    except ApiError as error:
        assert error.status == 400  # noqa: PT017 - what is raised is either nothing or this


@pytest.mark.parametrize("messages", [[{"role": "user", "content": []}], [{"role": "assistant", "content": []}] * 2])
@pytest.mark.parametrize("body", [{}, {"system": "s"}, {"counts_only": True}])
def test_messages_without_any_content_are_refused(messages: list[Any], body: dict[str, Any]):
    """There is no conversation to render, whatever the system prompt says."""
    with pytest.raises(ApiError) as caught:
        read(messages=messages, **body)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "messages", "empty_array")


def test_a_message_without_content_among_others_says_nothing():
    """As clients send for a turn that is to be opened."""
    asked = read(messages=[USER, {"role": "assistant", "content": []}])
    assert asked.chat.messages == [USER]
    assert asked.chat.template.add_generation_prompt
