"""Reasoning, apart from the answer."""

from __future__ import annotations

import litellm
from conftest import user

QUESTION = "What is 15 * 37?"
THOUGHT = "15 times 37 is 555."


def test_openai(server):
    """Under both names that clients know, whole and streamed."""
    call = {"model": server.model, "messages": user(QUESTION)}
    message = server.openai().chat.completions.create(**call).choices[0].message
    assert message.content.strip() == "555"
    assert message.reasoning.strip() == message.reasoning_content.strip() == THOUGHT
    deltas = [chunk.choices[0].delta for chunk in server.openai().chat.completions.create(**call, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas).strip() == THOUGHT
    assert "".join(delta.content or "" for delta in deltas).strip() == "555"


def test_litellm(server):
    """Where it looks for it."""
    message = litellm.completion(**server.litellm(), messages=user(QUESTION)).choices[0].message
    assert message.reasoning_content.strip() == THOUGHT
