"""The Responses API."""

from __future__ import annotations

import json

import openai
import pytest
from conftest import HELLO, WEATHER_PARAMETERS
from pydantic import BaseModel

COUNT = "1, 2, 3, 4, 5"
TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER_PARAMETERS, "strict": True}


class Person(BaseModel):
    """What is asked for."""

    name: str
    age: int


def test_openai_create(server):
    """Text, status and usage."""
    response = server.openai().responses.create(model=server.model, input="Hi", instructions="Be kind.")
    assert (response.output_text, response.status) == (HELLO, "completed")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_openai_stream(server):
    """Events in order, rising numbers, and the same text three times."""
    with server.openai().responses.stream(model=server.model, input="Count from 1 to 5.") as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(set(numbers))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == COUNT
    assert final.output_text == COUNT


def test_openai_parse(server):
    """A class as the answer's format."""
    parsed = server.openai().responses.parse(model=server.model, input="Describe a person as JSON.", text_format=Person)
    assert parsed.output_parsed == Person(name="Ada", age=36)


def test_openai_tools(server):
    """A call, streamed too, and the turn after it."""
    client = server.openai()
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    response = client.responses.create(model=server.model, input=question, tools=[TOOL])
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"location": "Paris \U0001f600"})
    with client.responses.stream(model=server.model, input=question, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
    assert "response.function_call_arguments.done" in kinds
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    turn = [*question, call.model_dump(exclude_none=True), result]
    assert "sunny in Paris" in client.responses.create(model=server.model, input=turn, tools=[TOOL]).output_text


def test_openai_incomplete(server):
    """A cut answer says so."""
    response = server.openai().responses.create(model=server.model, input="Hi", max_output_tokens=16)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_openai_errors(server):
    """Before the first byte a status, after it an event."""
    client = server.openai()
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=server.model, input="Hi", temperature=9)
    stream = client.responses.create(model=server.model, input="Break the stream.", stream=True)
    try:
        kinds = [event.type for event in stream]
    except openai.APIError:
        return
    assert kinds[-1] in {"error", "response.failed"}


def test_langchain(server):
    """Its Responses mode, whole and streamed."""
    chat = server.langchain(use_responses_api=True)
    assert chat.invoke("Count from 1 to 5.").text == COUNT
    assert "".join(chunk.text for chunk in chat.stream("Count from 1 to 5.")) == COUNT
