"""Several choices of one call."""

from __future__ import annotations

from conftest import user
from langchain_core.messages import HumanMessage

QUESTION = "Name a number."
NUMBERS = {"one", "two", "three"}


def test_openai_whole(server):
    """Three answers, one prompt; tokens are summed."""
    completion = server.openai().chat.completions.create(model=server.model, messages=user(QUESTION), n=3)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert {choice.message.content for choice in completion.choices} == NUMBERS
    single = server.openai().chat.completions.create(model=server.model, messages=user(QUESTION))
    assert completion.usage.prompt_tokens == single.usage.prompt_tokens
    assert completion.usage.completion_tokens > single.usage.completion_tokens


def test_openai_stream_helper(server):
    """The helper tells them apart."""
    with server.openai().chat.completions.stream(model=server.model, messages=user(QUESTION), n=3) as stream:
        final = stream.get_final_completion()
    assert [choice.index for choice in final.choices] == [0, 1, 2]
    assert {choice.message.content for choice in final.choices} == NUMBERS
    assert {choice.finish_reason for choice in final.choices} == {"stop"}


def test_langchain(server):
    """Generations of one prompt."""
    result = server.langchain(n=2).generate([[HumanMessage(QUESTION)]])
    assert len({generation.text for generation in result.generations[0]}) == 2
