"""Answers bound to a schema."""

from __future__ import annotations

import json

import litellm
import openai
import pytest
from conftest import user
from pydantic import BaseModel

QUESTION = "Describe a person as JSON."


class Person(BaseModel):
    """What is asked for."""

    name: str
    age: int


class get_weather(BaseModel):  # noqa: N801 - the name that the scripted model calls
    """The weather now."""

    location: str


ADA = Person(name="Ada", age=36)


def test_openai_parse(server):
    """The model's class comes back."""
    completion = server.openai().chat.completions.parse(
        model=server.model, messages=user(QUESTION), response_format=Person
    )
    assert completion.choices[0].message.parsed == ADA


def test_openai_stream_helper(server):
    """Also through the stream."""
    with server.openai().chat.completions.stream(
        model=server.model, messages=user(QUESTION), response_format=Person
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == ADA


def test_openai_json_object(server):
    """Any JSON object."""
    completion = server.openai().chat.completions.create(
        model=server.model, messages=user(QUESTION), response_format={"type": "json_object"}
    )
    assert json.loads(completion.choices[0].message.content) == ADA.model_dump()


def test_openai_cut_answer(server):
    """The SDK says that the limit was reached, instead of giving half an object."""
    with pytest.raises(openai.LengthFinishReasonError):
        server.openai().chat.completions.parse(
            model=server.model, messages=user(QUESTION), response_format=Person, max_tokens=3
        )


@pytest.mark.parametrize("schema", [None, {"name": "x", "schema": {"type": "nonsense"}}])
def test_openai_bad_schema(server, schema):
    """A 400 that names the parameter, never free text."""
    response_format = {"type": "json_schema", "json_schema": schema}
    with pytest.raises(openai.BadRequestError) as refused:
        server.openai().chat.completions.create(
            model=server.model, messages=user(QUESTION), response_format=response_format
        )
    assert str(refused.value.param).startswith("response_format")


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_langchain(server, method):
    """with_structured_output, by schema and by JSON mode."""
    assert server.langchain().with_structured_output(Person, method=method).invoke(QUESTION) == ADA


def test_langchain_by_a_tool(server):
    """The same by a tool that must be called."""
    chat = server.langchain().with_structured_output(get_weather, method="function_calling")
    assert chat.invoke("What is the weather in Paris?").location == "Paris \U0001f600"


def test_litellm(server):
    """A pydantic class as response_format."""
    completion = litellm.completion(**server.litellm(), messages=user(QUESTION), response_format=Person)
    assert Person.model_validate_json(completion.choices[0].message.content) == ADA
