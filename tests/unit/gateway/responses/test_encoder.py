"""Streams and bodies of the Responses API, by value."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2
import openai
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.answer import Piece
from gateway.logprobs import LogprobEntry, Spelled
from gateway.openai_errors import ApiError
from gateway.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from gateway.responses.encoder import CANCELLED, ResponseEncoder, ResponseIdentity
from gateway.responses.schema import read_response_request
from gateway.responses.store import ResponseStore
from gateway.sse import KEEP_ALIVE
from tests.support.fake_clock import FakeClock
from tests.support.pieces import SCORES, USAGE, ended, piece, streamed, whole
from tests.support.responses_validator import check_response, output_text, validate_response_stream

ENTRY = LogprobEntry(Spelled(5, "é", "é".encode(), -0.5), (Spelled(6, "x", b"x", -1.5),))
TURN = [
    piece(Reasoning("h")),
    piece(Reasoning("m\u2028")),
    piece(),
    piece(Content('a"\u0085')),
    piece(Content("b"), ToolCallBegin(0, "f", "call_1")),
    piece(ToolCallArguments(0, '{"a":')),
    piece(ToolCallArguments(0, "1}")),
    piece(ToolCallBegin(1, "g", "call_2"), ToolCallArguments(1, "{}")),
]
SHAPE = [
    ("reasoning", "hm\u2028"),
    ("message", 'a"\u0085b'),
    ("function_call", '{"a":1}'),
    ("function_call", "{}"),
]


def create_encoder(
    kept: list[dict[str, Any]] | None = None, *, has_logprobs: bool = False, **body: Any
) -> ResponseEncoder:
    """An encoder for the smallest call, and more."""
    data = json.dumps({"model": "m", "input": "hi", **body}).encode()
    asked = read_response_request(data, ResponseStore(FakeClock()))
    identity = ResponseIdentity(
        response_id="resp_1",
        created_at=7,
        model="m",
        echo={**asked.echo, "temperature": 1.0, "top_p": 1.0},
    )
    on_end = (kept if kept is not None else []).append
    return ResponseEncoder(identity, has_logprobs=has_logprobs, unix_time=lambda: 9.5, on_end=on_end)


def shape(response: dict[str, Any]) -> list[tuple[str, str]]:
    """Kinds of the items with what they say."""
    return [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in response["output"]
    ]


def without_ids(value: Any) -> str:
    """JSON with every minted id alike."""
    return re.sub(r'"(msg|rs|fc)_[0-9a-f]+"', '"id"', json.dumps(value))


def test_a_whole_turn_streams_item_by_item():
    """Reasoning, words, calls: each opened, written and closed before the next."""
    kept: list[dict[str, Any]] = []
    stream = validate_response_stream(streamed(create_encoder(kept), TURN, reason="tool_calls"))
    assert shape(stream.final) == SHAPE
    assert stream.final["status"] == "completed"
    assert stream.final["completed_at"] == 9
    assert [item.get("call_id") for item in stream.final["output"]] == [None, None, "call_1", "call_2"]
    assert stream.final["usage"]["input_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 0}
    assert stream.final["usage"]["total_tokens"] == 5
    assert kept == [stream.final]


def test_the_events_of_a_short_answer_come_in_openai_s_order():
    """Every one, by name."""
    stream = validate_response_stream(streamed(create_encoder(), [piece(Content("hi"))]))
    assert [name.removeprefix("response.") for name in stream.names] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


EVENTS = st.lists(
    st.lists(
        st.sampled_from([Content("a"), Reasoning("b"), ToolCallBegin(0, "f", "c"), ToolCallArguments(0, '{"x": 1}')])
    ),
    max_size=12,
)


@settings(max_examples=50, deadline=None)
@given(EVENTS, st.sampled_from(["stop", "length", "tool_calls"]))
def test_a_body_is_what_the_stream_ended_with(events: list[list[Event]], reason: str):
    """For any order of events, cut or not: the same response."""
    pieces = [piece(*_sane(some, events[:index])) for index, some in enumerate(events)]
    stream = validate_response_stream(streamed(create_encoder(), pieces, reason=reason))
    body = check_response(json.loads(whole(create_encoder(), pieces, reason=reason)))
    assert without_ids(body) == without_ids(stream.final)
    assert body["output"]
    assert (body["status"] == "incomplete") == (reason == "length")


def _sane(events: list[Event], before: list[list[Event]]) -> list[Event]:
    """Arguments only once, right after their call."""
    flat = [event for some in before for event in some]
    sane: list[Event] = []
    for event in events:
        last = (sane or flat or [None])[-1]
        if not isinstance(event, ToolCallArguments) or (sane and isinstance(last, ToolCallBegin)):
            sane.append(event)
    return sane


def test_what_is_cut_says_so():
    """The last item is incomplete, and the response with it."""
    body = check_response(json.loads(whole(create_encoder(), TURN[:-2], reason="length")))
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in body["output"]] == ["completed", "completed", "incomplete"]
    assert body["output"][2]["arguments"] == '{"a":'


@pytest.mark.parametrize("arguments", ["", '{"a', "[]"])
def test_a_call_that_the_model_did_not_finish_is_incomplete(arguments: str):
    """Even where it ended its turn, or went on with another."""
    call = [ToolCallBegin(0, "f", "c"), *([ToolCallArguments(0, arguments)] if arguments else [])]
    body = check_response(json.loads(whole(create_encoder(), [piece(*call, Content("x"))])))
    assert [item["status"] for item in body["output"]] == ["incomplete", "completed"]
    assert body["status"] == "completed"


def test_nothing_said_is_an_empty_message():
    """Clients look for a text."""
    body = check_response(json.loads(whole(create_encoder(), [piece()])))
    assert shape(body) == [("message", "")]


def test_log_probabilities_are_those_of_the_text():
    """Of the tokens that show it, hidden ones before included; none of reasoning or calls."""
    pieces = [
        piece(Reasoning("r"), logprobs=ENTRY),
        piece(logprobs=ENTRY),
        piece(Content("a"), logprobs=ENTRY),
        piece(ToolCallBegin(0, "f", "c"), logprobs=ENTRY),
        piece(logprobs=ENTRY),
    ]
    stream = validate_response_stream(streamed(create_encoder(has_logprobs=True), pieces))
    (part,) = stream.final["output"][1]["content"]
    assert len(part["logprobs"]) == 2
    assert part["logprobs"][0]["bytes"] == list("é".encode())
    assert part["logprobs"][0]["top_logprobs"] == [{"token": "x", "bytes": [120], "logprob": -1.5}]
    without = validate_response_stream(streamed(create_encoder(), pieces))
    assert without.final["output"][1]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("begun", [False, True])
def test_a_failure_gives_what_there_was_and_then_the_error(begun: bool):
    """In both of the forms that clients raise, even if nothing had been sent."""
    kept: list[dict[str, Any]] = []
    encoder = create_encoder(kept)
    frames = [encoder.begin(SCORES), encoder.piece(0, piece(Content("a")))] if begun else []
    frames += [KEEP_ALIVE, encoder.error(ApiError(503, "gone", kind="server_error", code="node_lost"))]
    stream = validate_response_stream(b"".join(frames))
    assert stream.final["error"] == {"code": "server_error", "message": "gone"}
    assert output_text(stream.final) == ("a" if begun else "")
    assert stream.error is not None
    assert stream.error["code"] == stream.error["error"]["code"] == "node_lost"
    assert kept == [stream.final]


def test_a_cancelled_response_ends_without_an_error():
    """With the status that says so, and its open item incomplete."""
    encoder = create_encoder()
    frames = [encoder.begin(SCORES), encoder.piece(0, piece(Content("a")))]
    frames.append(encoder.error(ApiError(409, "cancelled", code=CANCELLED)))
    stream = validate_response_stream(b"".join(frames))
    assert (stream.final["status"], stream.names[-1]) == ("cancelled", "response.incomplete")
    assert stream.final["output"][0]["status"] == "incomplete"


def test_what_was_not_streamed_can_be_caught_up_with():
    """A body's response can be looked at while it grows; nothing is taken in twice."""
    encoder = create_encoder()
    answer = ended(TURN[:4])
    encoder.catch_up(answer.transcript)
    assert shape(encoder.response("in_progress")) == [*SHAPE[:1], ("message", 'a"\u0085')]
    answer.transcript.add(TURN[4])
    body = json.loads(encoder.whole([answer], SCORES, USAGE))
    assert shape(body)[1] == SHAPE[1]


def client_of(body: bytes, content_type: str) -> openai.OpenAI:
    """The SDK, strict, answered with these bytes."""
    headers = {"content-type": content_type}
    transport = httpx2.MockTransport(lambda _request: httpx2.Response(200, content=body, headers=headers))
    return openai.OpenAI(
        api_key="x",
        base_url="http://mesh/v1",
        max_retries=0,
        http_client=httpx2.Client(transport=transport),
        _strict_response_validation=True,
    )


def test_the_sdk_accumulates_a_turn():
    """`.stream()` has the same items as the body."""
    body = streamed(create_encoder(), TURN, reason="tool_calls")
    with client_of(body, "text/event-stream").responses.stream(model="m", input="hi") as stream:
        final = stream.get_final_response()
    assert final.output_text == 'a"\u0085b'
    assert [item.type for item in final.output] == [kind for kind, _ in SHAPE]


class Weather(pydantic.BaseModel):
    """A tool's arguments, and a format."""

    city: str


def test_the_sdk_parses_formats_and_calls():
    """`.parse()` with a model for the text and one for a function."""
    pieces = [
        piece(Content('{"city": "Ulm"}')),
        piece(ToolCallBegin(0, "Weather", "c"), ToolCallArguments(0, '{"city": "Bonn"}')),
    ]
    tool = openai.pydantic_function_tool(Weather)["function"]
    tools = [{"type": "function", **tool}]
    text_format = {"type": "json_schema", "name": "Weather", "schema": Weather.model_json_schema(), "strict": True}
    encoder = create_encoder(tools=tools, text={"format": text_format})
    client = client_of(whole(encoder, pieces), "application/json")
    parsed = client.responses.parse(model="m", input="hi", text_format=Weather, tools=tools)  # type: ignore[arg-type]
    assert parsed.output_parsed == Weather(city="Ulm")
    assert parsed.output[1].parsed_arguments == {"city": "Bonn"}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"sequence_number":3', b'"sequence_number":4'),
        (b'"delta":"hi"', b'"delta":"ho"'),
        (b'"output_index":0', b'"output_index":1'),
        (b"event: response.created", b"event: response.begun"),
        (b'"background":false,', b""),
        (b"\ndata: ", b"\r\ndata: "),
        (b'"status":"completed","role"', b'"status":"in_progress","role"'),
    ],
)
def test_the_validator_notices(old: bytes, new: bytes):
    """A validator that passes everything would prove nothing."""
    body = streamed(create_encoder(), [piece(Content("hi"))])
    assert old in body
    with pytest.raises((AssertionError, pydantic.ValidationError)):
        validate_response_stream(body.replace(old, new, 1))


def test_the_validator_wants_an_end():
    """A stream that stops is not valid."""
    encoder = create_encoder()
    pieces: list[Piece] = [piece(Content("hi"))]
    frames = b"".join([encoder.begin(SCORES), *(encoder.piece(0, one) for one in pieces)])
    with pytest.raises(AssertionError, match="no last event"):
        validate_response_stream(frames)
