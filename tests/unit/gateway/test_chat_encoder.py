"""Frames and bodies, byte by byte."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from openai.types.chat import ChatCompletion

from gateway.answer import Answer, Piece
from gateway.answer_encoder import Usage
from gateway.chat_encoder import ChatEncoder, ChatOptions, CompletionIdentity
from gateway.detokenizer import ByteDetokenizer
from gateway.generation_request import PromptScores, Token
from gateway.logprobs import LogprobEntry, Spelled
from gateway.openai_errors import ApiError
from gateway.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from gateway.parsing.parser import PlainParser
from gateway.sse import DONE, KEEP_ALIVE, error_frame
from gateway.stop import StopMatcher
from tests.support.stream_validator import validate_stream

IDENTITY = CompletionIdentity(completion_id="chatcmpl-1", created=7, model='m"\u2028', fingerprint="fp_1")
USAGE = Usage(prompt_tokens=3, completion_tokens=2, reasoning_tokens=1)
SCORES = PromptScores()
ENTRY = LogprobEntry(
    Spelled(5, "é\u2028", "é\u2028".encode(), -0.5), (Spelled(6, "\N{REPLACEMENT CHARACTER}", b"\xf0", -1.5),)
)


def create_encoder(*, choices: int = 1, **options: object) -> ChatEncoder:
    """An encoder with these `ChatOptions`."""
    return ChatEncoder(IDENTITY, ChatOptions(**options), choices=choices)  # type: ignore[arg-type]


def piece(*events: Event, **fields: object) -> Piece:
    """A token that shows these."""
    return Piece(list(events), **{"token_id": 1, **fields})  # type: ignore[arg-type]


def finished(text: str = "hi", *, cut: bool = False) -> Answer:
    """An answer that is complete, or cut at its limit; its token ids are bytes."""
    ids = [*text.encode(), *([] if cut else [0])]
    detokenizer = ByteDetokenizer(lambda token_id: bytes([token_id]))
    answer = Answer(detokenizer, PlainParser(), StopMatcher(()), eos_ids={0}, max_tokens=len(ids))
    for token_id in ids:
        answer.push(Token(token_id))
    return answer


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_whole_stream_is_valid(include_usage: bool):
    """Role, content, finish, usage when asked for, the end."""
    encoder = create_encoder(include_usage=include_usage)
    frames = [
        encoder.begin(SCORES),
        encoder.piece(0, piece(Content('a"\u2028'))),
        encoder.piece(0, piece()),
        KEEP_ALIVE,
        encoder.piece(0, piece(Content("\U0001f600"))),
        encoder.finish(0, finished()),
        encoder.end(USAGE),
    ]
    stream = validate_stream(b"".join(frames), include_usage=include_usage)
    assert (stream.text, stream.finish_reason, stream.comments) == ('a"\u2028\U0001f600', "stop", 1)
    assert stream.chunks[0]["model"] == IDENTITY.model


def test_reasoning_calls_and_content_have_frames_of_their_own():
    """Reasoning under both of its names; a call's id and name once, then arguments alone."""
    encoder = create_encoder()
    events = [
        Reasoning("hm"),
        Content("ok"),
        ToolCallBegin(0, "f", "call_1"),
        ToolCallArguments(0, '{"a":'),
        ToolCallArguments(0, "1}"),
        ToolCallBegin(1, "g", "call_2"),
        ToolCallArguments(1, "{}"),
    ]
    frames = [encoder.begin(SCORES), encoder.piece(0, piece(*events)), encoder.finish(0, finished()), DONE]
    choice = validate_stream(b"".join(frames)).first
    assert (choice.text, choice.reasoning) == ("ok", "hm")
    assert [(call.id, call.name, call.arguments) for call in choice.calls] == [
        ("call_1", "f", '{"a":1}'),
        ("call_2", "g", "{}"),
    ]


def test_choices_appear_in_order_whichever_speaks_first():
    """Clients index lists by the order in which they see indices."""
    encoder = create_encoder(choices=3)
    frames = [encoder.begin(SCORES)]
    for choice in (2, 0, 1):
        frames += [encoder.piece(choice, piece(Content(str(choice)))), encoder.finish(choice, finished())]
    stream = validate_stream(b"".join([*frames, encoder.end(USAGE)]))
    assert [stream.choices[index].text for index in range(3)] == ["0", "1", "2"]


def test_log_probabilities_of_hidden_tokens_go_with_the_next_frame():
    """None is lost, and bytes are the token's own."""
    encoder = create_encoder(logprobs=True, token_ids=True, prompt_ids=(8, 9))
    frames = [
        encoder.begin(SCORES),
        encoder.piece(0, piece(logprobs=ENTRY)),
        encoder.piece(0, piece(Content("x"), logprobs=ENTRY, token_id=2)),
        encoder.piece(0, piece(logprobs=ENTRY, token_id=3)),
        encoder.finish(0, finished()),
        DONE,
    ]
    stream = validate_stream(b"".join(frames))
    assert [len((chunk["choices"][0]["logprobs"] or {}).get("content", [])) for chunk in stream.chunks] == [0, 2, 1]
    assert stream.first.logprobs[0]["bytes"] == list("é\u2028".encode())
    assert stream.first.logprobs[0]["top_logprobs"][0]["bytes"] == [0xF0]
    assert stream.first.token_ids == [1, 2, 3]
    assert stream.chunks[0]["choices"][0]["prompt_token_ids"] == [8, 9]


def test_usage_so_far_goes_with_every_frame():
    """As guidellm asks for it."""
    encoder = create_encoder(continuous_usage=True, include_usage=True, prompt_tokens=3)
    frames = [
        encoder.begin(SCORES),
        encoder.piece(0, piece(Reasoning("a"))),
        encoder.piece(0, piece(Content("b"))),
        encoder.finish(0, finished()),
        encoder.end(USAGE),
    ]
    stream = validate_stream(b"".join(frames), include_usage=True, continuous_usage=True)
    assert [chunk["usage"]["total_tokens"] for chunk in stream.chunks] == [3, 4, 5, 5, 5]


def test_an_error_frame_is_nested_and_ends_the_stream():
    """Flat error objects are swallowed by clients."""
    error = ApiError(503, "gone\u2029", kind="server_error", code="node_lost")
    stream = validate_stream(create_encoder().error(error))
    assert stream.error == {"message": "gone\u2029", "type": "server_error", "param": None, "code": "node_lost"}


def test_a_body_is_a_chat_completion():
    """Strictly, by the SDK's own type."""
    body = json.loads(create_encoder().whole([finished(cut=True)], SCORES, USAGE))
    completion = ChatCompletion.model_validate(body, strict=True)
    assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == ("hi", "length")
    assert completion.usage is not None
    assert completion.usage.total_tokens == 5
    assert completion.usage.completion_tokens_details is not None
    assert completion.usage.completion_tokens_details.reasoning_tokens == 1
    assert set(body["choices"][0]["message"]) == {"role", "content", "refusal"}
    assert set(body["choices"][0]) == {"index", "message", "logprobs", "finish_reason"}


def test_a_body_shows_calls_reasoning_log_probabilities_and_ids():
    """Content is null beside calls; keys for nothing are absent."""
    answer = finished("")
    answer.transcript.add(
        piece(Reasoning("hm"), ToolCallBegin(0, "f", "call_1"), ToolCallArguments(0, "{}"), logprobs=ENTRY)
    )
    encoder = create_encoder(logprobs=True, token_ids=True, prompt_ids=(8,), service_tier="auto")
    body = json.loads(encoder.whole([answer, finished()], SCORES, USAGE))
    ChatCompletion.model_validate(body, strict=True)
    first, second = body["choices"]
    assert first["message"]["content"] is None
    assert first["message"]["reasoning"] == first["message"]["reasoning_content"] == "hm"
    assert first["message"]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ]
    assert first["logprobs"]["content"][0]["token"] == "é\u2028"
    assert (first["token_ids"], body["prompt_token_ids"], body["service_tier"]) == ([0, 1], [8], "default")
    assert (second["index"], second["message"]["content"]) == (1, "hi")


Frames = Callable[[ChatEncoder], list[bytes]]


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        (lambda e: [e.piece(0, piece(Content("a")))], "first delta"),
        (lambda e: [e.begin(SCORES), e.begin(SCORES)], "content delta"),
        (lambda e: [e.begin(SCORES), e.finish(0, finished()), e.piece(0, piece(Content("a")))], "after its finish"),
        (lambda e: [e.begin(SCORES), DONE], "finish_reason"),
        (lambda e: [e.begin(SCORES), e.finish(0, finished())], "DONE"),
        (lambda e: [e.begin(SCORES), e.finish(0, finished()), create_encoder(include_usage=True).end(USAGE)], "usage"),
        (lambda e: [e.begin(SCORES), e.finish(0, finished()), error_frame(ApiError(503, "x"))], "look finished"),
        (lambda e: [e.begin(SCORES), e.piece(0, piece(ToolCallArguments(0, "{}")))], "first delta of a call"),
        (
            lambda e: [e.begin(SCORES), e.piece(0, piece(ToolCallBegin(0, "f", "c"))), e.finish(0, finished()), DONE],
            "Expecting value",
        ),
        (lambda _: [b"id: 1\n\n"], "not a data frame"),
        (lambda _: [b"data: \n\n"], "empty"),
        (lambda _: [b"data: {}"], "unfinished"),
    ],
)
def test_the_validator_notices(frames: Frames, complaint: str):
    """A validator that passes everything would prove nothing."""
    with pytest.raises((AssertionError, ValueError), match=complaint):
        validate_stream(b"".join(frames(create_encoder())))
