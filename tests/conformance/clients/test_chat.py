"""Plain chat completions."""

from __future__ import annotations

import asyncio
import json

import httpx
import litellm
import openai
import pytest
from conftest import HELLO, user

COUNT = "1, 2, 3, 4, 5"


def test_openai_whole(server):
    """Text, reason, usage and request id, strictly validated."""
    completion = server.openai().chat.completions.create(model=server.model, messages=user("Hi"))
    (choice,) = completion.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (HELLO, "assistant", "stop")
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
    assert completion._request_id


def test_openai_raw_stream(server):
    """Every chunk is valid; usage comes last, on request."""
    options = {"include_usage": True}
    call = {"model": server.model, "messages": user("Hi"), "stream": True, "stream_options": options}
    chunks = list(server.openai().chat.completions.create(**call))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == HELLO
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(HELLO.encode()) + 1


def test_openai_stream_helper(server):
    """What it accumulates equals the whole answer."""
    call = {"model": server.model, "messages": user("Count from 1 to 5."), "seed": 1}
    whole = server.openai().chat.completions.create(**call)
    with server.openai().chat.completions.stream(**call, stream_options={"include_usage": True}) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert events.count("content.done") == 1
    assert final.choices[0].message.content == whole.choices[0].message.content == COUNT
    assert final.choices[0].message.role == "assistant"
    assert final.usage == whole.usage


async def read_asynchronously(server):
    """The text of an asynchronous stream."""
    options = {"base_url": server.base_url, "api_key": "none", "max_retries": 0, "_strict_response_validation": True}
    async with openai.AsyncOpenAI(**options) as client:
        stream = await client.chat.completions.create(model=server.model, messages=user("Hi"), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def test_openai_async(server):
    """The same over asyncio."""
    assert asyncio.run(read_asynchronously(server)) == HELLO


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_openai_length_and_stop(server, limit):
    """Both limits, and stop strings across token borders."""
    client = server.openai()
    call = {"model": server.model, "messages": user("Count from 1 to 5.")}
    cut = client.chat.completions.create(**call, **{limit: 2}).choices[0]
    assert cut.finish_reason == "length"
    assert COUNT.startswith(cut.message.content)
    stopped = client.chat.completions.create(**call, stop=[", 4"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("1, 2, 3", "stop")


def test_openai_errors(server):
    """Each has its class, a message, and the four keys."""
    client = server.openai()
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=user("Hi"))
    assert unknown.value.code == "model_not_found"
    assert unknown.value.request_id
    with pytest.raises(openai.BadRequestError) as invalid:
        client.chat.completions.create(model=server.model, messages=user("Hi"), temperature=9)
    assert invalid.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model=server.model, messages=user("word " * 20_000))
    assert too_long.value.code == "context_length_exceeded"


def test_openai_broken_stream(server):
    """A failure in mid-stream is raised, and nothing looks finished."""
    stream = server.openai().chat.completions.create(
        model=server.model, messages=user("Break the stream."), stream=True
    )
    seen = []
    with pytest.raises(openai.APIError) as failed:
        seen.extend(stream)
    assert failed.value.code == "internal_error"
    assert seen
    assert not any(chunk.choices[0].finish_reason for chunk in seen)


def test_openai_lost_caches(server):
    """Misses and a lost link leave no trace in the answer."""
    with server.openai().chat.completions.stream(model=server.model, messages=user("Lose a cache.")) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "one two three four five six"


def test_langchain(server):
    """Invoke, stream with usage, batch."""
    chat = server.langchain(stream_usage=True)
    assert chat.invoke("Count from 1 to 5.").content == COUNT
    chunks = list(chat.stream("Count from 1 to 5."))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == COUNT
    assert whole.usage_metadata["output_tokens"] > 0
    assert whole.response_metadata["finish_reason"] == "stop"
    assert [answer.content for answer in chat.batch(["Count from 1 to 5.", "Hi"])] == [COUNT, HELLO]


def test_litellm(server):
    """Whole, streamed, and rebuilt from chunks."""
    call = {**server.litellm(), "messages": user("Count from 1 to 5.")}
    assert litellm.completion(**call).choices[0].message.content == COUNT
    chunks = list(litellm.completion(**call, stream=True, stream_options={"include_usage": True}))
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.choices[0].message.content == COUNT
    assert rebuilt.choices[0].finish_reason == "stop"


def test_litellm_errors(server):
    """It tells an overflow from other bad requests, and notices a broken stream."""
    call = server.litellm()
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**call, messages=user("word " * 20_000))
    with pytest.raises(litellm.exceptions.MidStreamFallbackError):
        list(litellm.completion(**call, messages=user("Break the stream."), stream=True))


def test_raw_headers(server):
    """A stream announces itself so that no proxy holds it back."""
    body = json.dumps({"model": server.model, "messages": user("Hi"), "stream": True})
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.base_url}/chat/completions", content=body, headers=headers)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "no-cache" in response.headers["cache-control"]
    assert response.headers["x-request-id"]
    assert response.text.endswith("data: [DONE]\n\n")
