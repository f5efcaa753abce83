"""Streams and bodies of the Messages API, by value."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.messages.encoder import PING, MessageEncoder, MessageIdentity
from gateway.messages.errors import error_body, error_status, speaks_anthropic
from gateway.openai_errors import ApiError, unsupported
from gateway.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from tests.support.messages_validator import check_error, check_message, validate_message_stream
from tests.support.pieces import SCORES, piece, streamed, whole

IDENTITY = MessageIdentity(message_id="msg_1", model='m"\u2028', prompt_tokens=3, request_id="req_1")
TURN = [
    piece(Reasoning("h")),
    piece(Reasoning("m")),
    piece(Content("a\u2028")),
    piece(Content("b"), ToolCallBegin(0, "f", "call_1")),
    piece(ToolCallArguments(0, '{"a":')),
    piece(ToolCallArguments(0, "1}")),
    piece(ToolCallBegin(1, "g", "call_2"), ToolCallArguments(1, "{}")),
]
USES = [
    {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}},
    {"type": "tool_use", "id": "call_2", "name": "g", "input": {}, "caller": {"type": "direct"}},
]


def create_encoder(*, shows_thinking: bool = True) -> MessageEncoder:
    """An encoder for one message."""
    return MessageEncoder(IDENTITY, shows_thinking=shows_thinking)


def test_a_whole_turn_streams_block_by_block():
    """Thinking with its signature, text, and the use of tools."""
    stream = validate_message_stream(streamed(create_encoder(), TURN, reason="tool_calls"))
    thinking, text, *uses = stream.message["content"]
    assert (thinking["thinking"], text["text"], uses) == ("hm", "a\u2028b", USES)
    assert (stream.message["stop_reason"], stream.message["model"]) == ("tool_use", IDENTITY.model)
    usage = stream.message["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (1, 2, 2)
    assert usage["output_tokens_details"] == {"thinking_tokens": 1}


def test_the_events_of_a_short_answer_come_in_anthropic_s_order():
    """Every one, by name."""
    stream = validate_message_stream(streamed(create_encoder(), [piece(Content("hi"))]))
    assert [event["type"] for event in stream.events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


EVENTS = st.lists(
    st.lists(
        st.sampled_from([[Content("a")], [Reasoning("b")], [ToolCallBegin(0, "f"), ToolCallArguments(0, '{"x": 1}')]]),
        max_size=3,
    ),
    max_size=8,
)


@settings(max_examples=50, deadline=None)
@given(EVENTS, st.booleans(), st.sampled_from(["stop", "length", "tool_calls"]))
def test_a_body_is_what_the_stream_adds_up_to(events: list[list[list[Event]]], shows_thinking: bool, reason: str):
    """For any order of events."""
    pieces = [piece(*(event for some in group for event in some)) for group in events]
    encoders = [create_encoder(shows_thinking=shows_thinking) for _ in range(2)]
    stream = validate_message_stream(streamed(encoders[0], pieces, reason=reason))
    body = check_message(json.loads(whole(encoders[1], pieces, reason=reason)))
    assert _without_ids(body) == _without_ids(stream.message)


def _without_ids(value: Any) -> str:
    return re.sub(r'"call_[0-9a-f]+"', '"id"', json.dumps(value))


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({}, ("end_turn", None)),
        ({"reason": "length"}, ("max_tokens", None)),
        ({"stop_reason": "STOP"}, ("stop_sequence", "STOP")),
    ],
)
def test_why_it_ended(end: dict[str, str], expected: tuple[str, str | None]):
    """In Anthropic's words."""
    body = check_message(json.loads(whole(create_encoder(), [piece(Content("a"))], **end)))
    assert (body["stop_reason"], body["stop_sequence"]) == expected


def test_a_call_that_the_caller_chose_is_a_use_of_a_tool_all_the_same():
    """Where a chat completion says `stop`."""
    body = json.loads(whole(create_encoder(), TURN, reason="stop"))
    assert body["stop_reason"] == "tool_use"


def test_thinking_that_nobody_asked_for_is_not_shown():
    """Clients read the first block as the answer."""
    for body in (
        json.loads(whole(create_encoder(shows_thinking=False), TURN)),
        validate_message_stream(streamed(create_encoder(shows_thinking=False), TURN)).message,
    ):
        assert [block["type"] for block in body["content"]] == ["text", "tool_use", "tool_use"]


def test_a_use_that_was_cut_is_left_out_of_a_body():
    """Half an object is no input."""
    body = check_message(json.loads(whole(create_encoder(), TURN[:5], reason="length")))
    assert [block["type"] for block in body["content"]] == ["thinking", "text"]


@pytest.mark.parametrize("arguments", ["", "{", "[]"])
def test_an_input_that_is_no_object_is_a_failure(arguments: str):
    """The shape has no place for it; a second try may give a better one."""
    pieces = [piece(ToolCallBegin(0, "f", "c"), *([ToolCallArguments(0, arguments)] if arguments else []))]
    assert validate_message_stream(streamed(create_encoder(), pieces)).message["stop_reason"] == "end_turn"
    with pytest.raises(ApiError, match="'f' with an input that is not a JSON object") as raised:
        whole(create_encoder(), pieces)
    assert raised.value.status == 502


def test_an_error_ends_the_stream():
    """After pings, as what clients raise."""
    frames = [create_encoder().begin(SCORES), PING, create_encoder().error(ApiError(503, "gone", kind="server_error"))]
    stream = validate_message_stream(b"".join(frames))
    assert stream.error == {"type": "overloaded_error", "message": "gone"}
    assert stream.pings == 1


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, (400, "invalid_request_error")),
        (401, (401, "authentication_error")),
        (404, (404, "not_found_error")),
        (405, (405, "invalid_request_error")),
        (413, (413, "request_too_large")),
        (429, (429, "rate_limit_error")),
        (500, (500, "api_error")),
        (502, (502, "api_error")),
        (503, (529, "overloaded_error")),
    ],
)
def test_errors_have_anthropic_s_types(status: int, expected: tuple[int, str]):
    """By their status."""
    error = ApiError(status, "x")
    body = check_error(json.loads(error_body(error, "req_1")))
    assert (error_status(error), body["type"]) == expected


def test_the_sdk_is_told_to_go_on_without_a_thread():
    """Its tool runner asks for one, and sends the whole conversation when it learns that there are none."""
    body = check_error(json.loads(error_body(unsupported("thread", "x"), "req_1")))
    assert body["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/v1/messages", True), ("/v1/messages/count_tokens", True), ("/v1/messagesx", False), ("/v1/models", False)],
)
def test_whose_paths_they_are(path: str, expected: bool):
    """Everything else speaks OpenAI's."""
    assert speaks_anthropic(path) == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"index":0', b'"index":1'),
        (b'"text_delta","text"', b'"thinking_delta","thinking"'),
        (b'"stop_reason":"end_turn"', b'"stop_reason":"stop"'),
        (b"event: message_start", b"event: message_begin"),
        (b'"output_tokens":2,', b""),
        (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', b""),
    ],
)
def test_the_validator_notices(old: bytes, new: bytes):
    """A validator that passes everything would prove nothing."""
    body = streamed(create_encoder(), [piece(Content("hi"))])
    assert old in body
    with pytest.raises((AssertionError, KeyError)):
        validate_message_stream(body.replace(old, new, 1))
