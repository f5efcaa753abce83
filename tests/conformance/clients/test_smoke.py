"""One call of each kind with each client, whatever the model answers: for scripted and real models alike."""

from __future__ import annotations

import litellm

MESSAGES = [{"role": "user", "content": "Say hello in three words."}]
MAX_TOKENS = 32
"""Enough for the answer to end by itself: the SDK's helper raises where it is cut."""


def test_openai(server):
    """Whole, streamed, and through the accumulating helper: the same words."""
    client = server.openai()
    call = {"model": server.model, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0}
    whole = client.chat.completions.create(**call)
    assert whole.choices[0].finish_reason in {"stop", "length"}
    assert 1 <= whole.usage.completion_tokens <= MAX_TOKENS
    chunks = list(client.chat.completions.create(**call, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    with client.chat.completions.stream(**call, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage == whole.usage


def test_models(server):
    """The model is listed, and can be asked for."""
    client = server.openai()
    assert server.model in {model.id for model in client.models.list()}
    assert client.models.retrieve(server.model).id == server.model


def test_litellm(server):
    """Whole and streamed."""
    call = {**server.litellm(), "messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0}
    whole = litellm.completion(**call)
    chunks = list(litellm.completion(**call, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_langchain(server):
    """Whole and streamed."""
    chat = server.langchain(max_tokens=MAX_TOKENS, temperature=0)
    whole = chat.invoke("Say hello in three words.")
    assert "".join(chunk.content for chunk in chat.stream("Say hello in three words.")) == whole.content
