"""Anthropic's Messages API, with its SDK."""

from __future__ import annotations

import anthropic
import pytest
from conftest import HELLO, WEATHER_PARAMETERS, user

COUNT = "1, 2, 3, 4, 5"
TOOL = {"name": "get_weather", "description": "The weather now.", "input_schema": WEATHER_PARAMETERS}


def test_create(server):
    """Text, reason and usage."""
    message = server.anthropic().messages.create(
        model=server.model, max_tokens=64, system="Be kind.", messages=user("Hi")
    )
    assert (message.content[0].text, message.stop_reason, message.role) == (HELLO, "end_turn", "assistant")
    assert message.usage.output_tokens > 0


def test_stream(server):
    """The helper accumulates what the whole answer says."""
    with server.anthropic().messages.stream(
        model=server.model, max_tokens=64, messages=user("Count from 1 to 5.")
    ) as stream:
        assert "".join(stream.text_stream) == COUNT
        assert stream.get_final_message().stop_reason == "end_turn"


def test_limits_and_stops(server):
    """max_tokens and stop sequences have reasons of their own."""
    client, call = server.anthropic(), {"model": server.model, "messages": user("Count from 1 to 5.")}
    assert client.messages.create(**call, max_tokens=2).stop_reason == "max_tokens"
    stopped = client.messages.create(**call, max_tokens=64, stop_sequences=[", 4"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", ", 4", "1, 2, 3")


def test_tools(server):
    """A call, streamed too, and the turn after it."""
    client, messages = server.anthropic(), user("What is the weather in Paris?")
    call = {"model": server.model, "max_tokens": 256, "tools": [TOOL]}
    message = client.messages.create(**call, messages=messages)
    (use,) = [block for block in message.content if block.type == "tool_use"]
    assert (use.name, use.input, message.stop_reason) == ("get_weather", {"location": "Paris \U0001f600"}, "tool_use")
    with client.messages.stream(**call, messages=messages) as stream:
        streamed = stream.get_final_message()
    assert [block.input for block in streamed.content if block.type == "tool_use"] == [use.input]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {"role": "user", "content": [result]},
    ]
    assert "sunny in Paris" in client.messages.create(**call, messages=messages).content[0].text


def test_errors(server):
    """In the shape that this SDK reads."""
    client = server.anthropic()
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="no-such-model", max_tokens=8, messages=user("Hi"))
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=server.model, max_tokens=-1, messages=user("Hi"))
    call = {"model": server.model, "max_tokens": 64, "messages": user("Break the stream.")}
    with pytest.raises(anthropic.APIError), client.messages.stream(**call) as stream:
        stream.get_final_message()
