"""Bodies of the Responses API: what is asked, what is repeated, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from gateway.openai_errors import ApiError
from gateway.responses.parameters import TABLE
from gateway.responses.schema import ResponseRequest, read_response_request
from gateway.responses.store import ResponseStore
from tests.support.fake_clock import FakeClock

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}

KEYWORDS = st.sampled_from([
    "type", "role", "content", "text", "input_text", "output_text", "message", "function", "function_call",
    "function_call_output", "call_id", "name", "arguments", "output", "reasoning", "summary", "format", "json_schema",
    "schema", "auto", "required", "tool_choice", "allowed_tools", "tools", "mode", "user", "assistant", "id",
    "item_reference", "f", "{}",
])  # fmt: skip


def read(kept: ResponseStore | None = None, /, **body: Any) -> ResponseRequest:
    """Read the smallest body, and more."""
    data = json.dumps({"model": "m", "input": "hi", **body}).encode()
    return read_response_request(data, kept or ResponseStore(FakeClock()))


def test_every_parameter_of_the_sdk_is_known():
    """Honoured, harmless or refused; never unknown."""
    known = {*TABLE.honoured, *TABLE.harmless, *TABLE.refused}
    assert set(ResponseCreateParamsBase.__annotations__) <= known
    assert not (set(TABLE.honoured) & set(TABLE.refused) | set(TABLE.honoured) & set(TABLE.harmless))


def test_the_smallest_body():
    """Everything else is left to the server, and repeated as it is then."""
    asked = read()
    assert asked.chat.messages == [{"role": "user", "content": "hi"}]
    assert asked.store
    assert not asked.has_logprobs
    assert asked.chat.answer.logprobs is None
    assert asked.echo["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert asked.echo["tool_choice"] == "auto"
    assert asked.chat.tools.mode == "none"


def test_everything_that_is_asked_arrives():
    """In the chat request, and in what the response repeats."""
    asked = read(
        instructions="be kind",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        presence_penalty=1,
        frequency_penalty=-1,
        seed=3,
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.1,
        tools=[{**TOOL, "description": "d", "strict": True}],
        parallel_tool_calls=False,
        text={"format": SCHEMA, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        metadata={"a": "b"},
        store=False,
        stream=True,
        user="u",
        service_tier="flex",
        max_tool_calls=2,
        safety_identifier="s",
        prompt_cache_key="k",
        new_thing=1,
    )
    chat = asked.chat
    assert chat.messages[0] == {"role": "system", "content": "be kind"}
    assert (chat.sampling.temperature, chat.sampling.top_p, chat.sampling.seed) == (0.5, 0.9, 3)
    assert (chat.sampling.presence_penalty, chat.sampling.frequency_penalty) == (1, -1)
    assert (chat.sampling.top_k, chat.sampling.min_p, chat.sampling.repetition_penalty) == (4, 0.1, 1.1)
    assert (chat.answer.max_tokens, chat.answer.max_tokens_param, chat.answer.logprobs) == (7, "max_output_tokens", 2)
    assert (chat.format.kind, chat.format.value) == ("json_schema", {"type": "object"})
    assert chat.template.kwargs == {"reasoning_effort": "low", "enable_thinking": True}
    assert (chat.tools.mode, chat.tools.parallel, chat.stream, chat.unknown) == ("auto", False, True, ("new_thing",))
    (tool,) = chat.tools.tools
    assert tool.strict
    assert tool.definition["function"] == {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert asked.echo["tools"] == [{**TOOL, "description": "d", "strict": True}]
    assert asked.echo["text"] == {
        "format": {**SCHEMA, "description": None, "strict": False},
        "verbosity": "low",
    }
    assert asked.echo["service_tier"] == "default"
    assert asked.echo["metadata"] == {"a": "b"}
    assert asked.echo["max_tool_calls"] == 2
    assert not asked.store


def test_alternatives_alone_ask_for_log_probabilities():
    """A parameter is never ignored."""
    assert read(top_logprobs=3).chat.answer.logprobs == 3
    assert read(include=["message.output_text.logprobs"]).chat.answer.logprobs == 0


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", (), False)),
        ("none", ("none", (), False)),
        ("required", ("required", (), False)),
        ({"type": "function", "name": "g"}, ("required", ("g",), True)),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            ("auto", ("f",), False),
        ),
    ],
)
def test_the_choice_of_a_tool(choice: Any, expected: tuple[str, tuple[str, ...], bool]):
    """Repeated as it was given."""
    asked = read(tools=[TOOL, {**TOOL, "name": "g"}], tool_choice=choice)
    tools = asked.chat.tools
    assert (tools.mode, tools.allowed, tools.is_named) == expected
    assert asked.echo["tool_choice"] == (choice or "auto")


def test_a_previous_response_comes_before_the_input():
    """Its instructions do not."""
    store = ResponseStore(FakeClock())
    first = read(store, instructions="old")
    said = {"id": "msg_1", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ho"}]}
    response = {"id": "resp_1", "status": "completed", "previous_response_id": None, "output": [said]}
    store.keep(response, first.items)
    second = read(store, input="more", previous_response_id="resp_1", instructions="new")
    assert [(message["role"], message["content"]) for message in second.chat.messages] == [
        ("system", "new"),
        ("user", "hi"),
        ("assistant", "ho"),
        ("user", "more"),
    ]
    assert len(second.items) == 1
    referring = read(store, input=[{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "x"}])
    assert referring.chat.messages[0]["content"] == "ho"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"input": None}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1.5}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"store": "yes"}, "store"),
        ({"instructions": 1}, "instructions"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"include": "x"}, "include"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(key): "" for key in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {**SCHEMA, "name": "a b"}}}, "text.format.name"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f!"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{**TOOL, "parameters": []}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.tools",
        ),
        ({"max_tool_calls": "2"}, "max_tool_calls"),
        ({"user": 1}, "user"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str):
    """A 400 with the path of the parameter."""
    with pytest.raises(ApiError) as raised:
        read(**body)
    assert (raised.value.status, raised.value.param) == (400, param)


@pytest.mark.parametrize("name", [name for name in TABLE.refused if "." not in name])
def test_what_is_refused_is_named_unless_it_asks_for_nothing(name: str):
    """Null and neutral values pass."""
    refused = TABLE.refused[name]
    for neutral in (None, *refused.neutral):
        read(**{name: neutral})
    with pytest.raises(ApiError) as raised:
        read(**{name: {"some": "value"}})
    assert (raised.value.param, raised.value.code) == (name, "unsupported_parameter")


def test_a_forgotten_response_is_a_404():
    """Under OpenAI's code."""
    with pytest.raises(ApiError) as raised:
        read(previous_response_id="resp_gone")
    assert (raised.value.status, raised.value.code) == (404, "previous_response_not_found")


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
        assert error.status in (400, 404)  # noqa: PT017 - what is raised is either nothing or this


@pytest.mark.parametrize("instructions", [None, "s"])
def test_an_input_of_nothing_but_a_call_that_was_cut_off_is_refused(instructions: str | None):
    """No template could show it, so there is no conversation."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a', "status": "incomplete"}
    with pytest.raises(ApiError) as caught:
        read(input=[call], instructions=instructions)
    assert (caught.value.status, caught.value.param) == (400, "input")
