"""Frames and bodies, byte by byte."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletion

from gateway.openai_errors import ApiError
from gateway.openai_stream import (
    DONE,
    KEEP_ALIVE,
    ChunkEncoder,
    CompletionIdentity,
    Usage,
    completion_body,
    error_frame,
)
from tests.support.stream_validator import validate_stream

IDENTITY = CompletionIdentity(completion_id="chatcmpl-1", created=7, model='m"\u2028', fingerprint="fp_1")
USAGE = Usage(prompt_tokens=3, completion_tokens=2)


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_whole_stream_is_valid(include_usage: bool):
    """Role, content, finish, usage when asked for, the end."""
    encoder = ChunkEncoder(IDENTITY, include_usage=include_usage)
    frames = [
        encoder.role(),
        encoder.content('a"\u2028'),
        KEEP_ALIVE,
        encoder.content("\U0001f600"),
        encoder.finish("stop"),
    ]
    frames += [encoder.usage(USAGE)] if include_usage else []
    stream = validate_stream(b"".join([*frames, DONE]), include_usage=include_usage)
    assert (stream.text, stream.finish_reason, stream.comments) == ('a"\u2028\U0001f600', "stop", 1)
    assert stream.chunks[0]["model"] == IDENTITY.model


def test_an_error_frame_is_nested_and_ends_the_stream():
    """Flat error objects are swallowed by clients."""
    stream = validate_stream(error_frame(ApiError(503, "gone\u2029", kind="server_error", code="node_lost")))
    assert stream.error == {"message": "gone\u2029", "type": "server_error", "param": None, "code": "node_lost"}


def test_a_body_is_a_chat_completion():
    """Strictly, by the SDK's own type."""
    body = json.loads(completion_body(IDENTITY, "hi", "length", USAGE))
    completion = ChatCompletion.model_validate(body, strict=True)
    assert completion.choices[0].message.content == "hi"
    assert completion.usage is not None
    assert completion.usage.total_tokens == 5
    assert set(body["choices"][0]["message"]) == {"role", "content", "refusal"}


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        (lambda e: [e.content("a")], "first delta"),
        (lambda e: [e.role(), e.role()], "content delta"),
        (lambda e: [e.role(), e.finish("stop"), e.content("a")], "after its finish"),
        (lambda e: [e.role(), DONE], "finish_reason"),
        (lambda e: [e.role(), e.finish("stop")], "DONE"),
        (lambda e: [e.role(), e.finish("stop"), e.usage(USAGE), DONE], "usage"),
        (lambda e: [e.role(), e.finish("stop"), error_frame(ApiError(503, "x"))], "look finished"),
        (lambda e: [b"id: 1\n\n"], "not a data frame"),
        (lambda e: [b"data: \n\n"], "empty"),
        (lambda e: [b"data: {}"], "unfinished"),
    ],
)
def test_the_validator_notices(frames: object, complaint: str):
    """A validator that passes everything would prove nothing."""
    encoder = ChunkEncoder(IDENTITY, include_usage=False)
    with pytest.raises(AssertionError, match=complaint):
        validate_stream(b"".join(frames(encoder)))  # type: ignore[operator]
