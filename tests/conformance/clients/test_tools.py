"""Tool calls, whole and streamed, and the turn after them."""

from __future__ import annotations

import json

import litellm
import openai
import pytest
from conftest import user
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool

PARIS = {"location": "Paris \U0001f600"}
SUNNY = "It is sunny in Paris, 21 degrees."


@tool
def get_weather(location: str) -> str:
    """The weather now.

    Args:
        location: City name.
    """
    return f"sunny in {location}"


def one_call(message):
    """Name and arguments of a message's only call."""
    (call,) = message.tool_calls
    assert call.id
    assert call.type == "function"
    return call.function.name, json.loads(call.function.arguments)


@pytest.mark.parametrize("tool_choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_openai_whole(server, weather_tool, tool_choice):
    """One call; no text beside it."""
    completion = server.openai().chat.completions.create(
        model=server.model,
        messages=user("What is the weather in Paris?"),
        tools=[weather_tool],
        tool_choice=tool_choice,
    )
    (choice,) = completion.choices
    assert one_call(choice.message) == ("get_weather", PARIS)
    assert not choice.message.content
    assert choice.finish_reason in {"tool_calls", "stop"}
    assert tool_choice != "auto" or choice.finish_reason == "tool_calls"


@pytest.mark.parametrize(("question", "count"), [("What is the weather in Paris?", 1), ("And in Paris and London?", 2)])
def test_openai_stream_helper(server, weather_tool, question, count):
    """The helper's calls equal those of the whole answer."""
    call = {"model": server.model, "messages": user(question), "tools": [weather_tool], "seed": 5}
    whole = server.openai().chat.completions.create(**call).choices[0]
    with server.openai().chat.completions.stream(**call) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert events.count("tool_calls.function.arguments.done") == count
    calls = [(one.function.name, one.function.arguments) for one in whole.message.tool_calls]
    assert [(one.function.name, one.function.arguments) for one in final.message.tool_calls] == calls
    assert len({one.id for one in final.message.tool_calls}) == len(calls) == count
    assert final.finish_reason == whole.finish_reason == "tool_calls"


def test_openai_parse(server, weather_tool):
    """A strict tool's arguments come parsed."""
    strict = {**weather_tool, "function": {**weather_tool["function"], "strict": True}}
    completion = server.openai().chat.completions.parse(
        model=server.model, messages=user("What is the weather in Paris?"), tools=[strict]
    )
    assert completion.choices[0].message.tool_calls[0].function.parsed_arguments == PARIS


def test_openai_next_turn(server, weather_tool):
    """The result goes back, the call's arguments as the string that came."""
    client, messages = server.openai(), user("What is the weather in Paris?")
    call = {"model": server.model, "tools": [weather_tool]}
    answer = client.chat.completions.create(**call, messages=messages).choices[0].message
    messages += [
        answer.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "sunny, 21 degrees"},
    ]
    assert client.chat.completions.create(**call, messages=messages).choices[0].message.content == SUNNY


def test_openai_no_tools_wanted(server, weather_tool):
    """``none`` shows whatever the model writes as text, and an unknown name is a 400."""
    client = server.openai()
    call = {"model": server.model, "messages": user("Hi"), "tools": [weather_tool]}
    assert client.chat.completions.create(**call, tool_choice="none").choices[0].message.tool_calls is None
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**call, tool_choice={"type": "function", "function": {"name": "nope"}})
    assert str(refused.value.param).startswith("tool_choice")


def test_langchain(server):
    """bind_tools: whole, streamed, and the turn after."""
    chat = server.langchain().bind_tools([get_weather])
    question = HumanMessage("What is the weather in Paris?")
    answer = chat.invoke([question])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", PARIS)
    chunks = list(chat.stream([question]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [("get_weather", PARIS)]
    result = ToolMessage("sunny", tool_call_id=call["id"])
    assert chat.invoke([question, answer, result]).content == SUNNY


def test_litellm(server, weather_tool):
    """Whole, and rebuilt from the stream."""
    call = {**server.litellm(), "messages": user("What is the weather in Paris?"), "tools": [weather_tool]}
    assert one_call(litellm.completion(**call).choices[0].message) == ("get_weather", PARIS)
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**call, stream=True)))
    assert one_call(rebuilt.choices[0].message) == ("get_weather", PARIS)
    assert rebuilt.choices[0].finish_reason == "tool_calls"
