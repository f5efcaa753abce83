"""Faults of chunks, usage, errors and limits that users reported of other servers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.conformance.caller import CHAT, MODEL, Caller, calling, error_of, fault, rule
from tests.support.stream_validator import validate_stream

RULES = [
    rule("count", "one two three four five"),
    rule("breaks", "one two three four five", faults=[fault("error", 3, times=0)]),
    rule(
        "lose everything",
        "one two three four five six",
        faults=[
            fault("miss", 1, hop="first"),
            fault("miss", 2, hop="middle"),
            fault("miss", 3, hop="last"),
            fault("drop_link", 4, hop="middle"),
            fault("crash", 5, for_s=0.1),
        ],
    ),
]


@pytest.fixture(scope="module")
def caller() -> Iterator[Caller]:
    """One mesh for all tests of this file."""
    with calling(RULES) as running:
        yield running


def frames(caller: Caller, **parameters: object) -> list[dict]:
    """The JSON frames of a stream, as they came."""
    text = caller.post("count", stream=True, **parameters).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_finish_reason_is_an_empty_string(caller: Caller):
    """ollama#4357, sglang#3912: null until the last chunk, present on every one."""
    reasons = [frame["choices"][0]["finish_reason"] for frame in frames(caller)]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]


def test_the_role_is_repeated_and_done_is_missing(caller: Caller):
    """LocalAI#340: one role, and one end marker."""
    assert sum("role" in frame["choices"][0]["delta"] for frame in frames(caller)) == 1
    assert caller.post("count", stream=True).text.count("data: [DONE]\n\n") == 1


def test_the_last_delta_holds_nulls(caller: Caller):
    """litellm#2010: user interfaces print them as text."""
    assert frames(caller)[-1]["choices"][0]["delta"] == {}
    assert not any(value is None for frame in frames(caller) for value in frame["choices"][0]["delta"].values())


def test_the_object_is_misspelled(caller: Caller):
    """mlx-examples#913: SDKs ignore chunks of any other name."""
    assert {frame["object"] for frame in frames(caller)} == {"chat.completion.chunk"}
    assert caller.chat("count")["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("parameters", "reason"), [({}, "stop"), ({"max_tokens": 2}, "length"), ({"stop": " t"}, "stop")]
)
def test_a_choice_does_not_finish_or_finishes_differently_in_a_stream(
    caller: Caller, parameters: dict[str, object], reason: str
):
    """vllm#27572, python-genai#2868: both modes give the same reason."""
    assert caller.both("count", **parameters).finish_reason == reason


def test_usage_is_missing_from_a_stream(caller: Caller):
    """ollama#4448, litellm#3490: on request it comes last, equal to that of the whole answer."""
    answer = caller.both("count")
    assert answer.stream.usage == answer.whole["usage"]


def test_a_usage_chunk_without_choices_surprises_clients(caller: Caller):
    """spoon-core#179: it is sent only on request."""
    assert all(frame["choices"] for frame in frames(caller))
    assert all("usage" not in frame for frame in frames(caller))


def test_a_failure_in_mid_stream_looks_like_an_end(caller: Caller):
    """coddy-agent#106, lemonade#2826, any-llm#847: one error frame in a data line, then nothing, no reason."""
    response = caller.post("breaks", stream=True)
    stream = validate_stream(response.content)
    assert stream.text.startswith("one two")
    assert stream.error is not None
    assert stream.error["code"] == "internal_error"
    assert stream.finish_reason is None
    caller.works()


def test_a_failed_answer_is_given_as_if_it_were_complete(caller: Caller):
    """any-llm#847, not streamed: a server error, and no text."""
    assert caller.error("breaks", status=503)["type"] == "server_error"


def test_a_lost_node_ends_the_stream_or_hangs_it():
    """exo, Petals and llama.cpp's RPC: the stream ends with an error frame once nobody has come back in time."""
    lost = rule("lost", "one two three four five", faults=[fault("crash", 2, hop="middle")])
    with calling([lost], gateway=["--failover-timeout-seconds", "0.3"]) as caller:
        stream = validate_stream(caller.post("lost", stream=True).content)
        assert stream.error is not None
        assert (stream.error["code"], stream.finish_reason) == ("node_lost", None)
        assert caller.mesh.http.get("/readyz").status_code == 503


def test_a_lost_cache_changes_the_answer(caller: Caller):
    """Whatever is lost at whichever hop, in one answer after the other, text and usage are those of a calm run."""
    answer = caller.both("lose everything")
    assert answer.text == "one two three four five six"
    assert answer.stream.comments == 0


def test_the_context_message_has_nonsense_numbers(caller: Caller):
    """vllm#33418: the limit, the prompt's tokens and what was asked for; LiteLLM looks for the phrase."""
    error = caller.error("count", max_tokens=5000)
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert "maximum context length is 4096" in error["message"]
    assert "5000" in error["message"]


def test_a_long_prompt_ends_the_server(caller: Caller):
    """vllm#13067: it is refused, and the next call works."""
    assert caller.error("word " * 100_000)["code"] == "context_length_exceeded"
    caller.works()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "x"),
        ("temperature", 1e308),
        ("top_p", 0),
        ("top_p", 2),
        ("n", 0),
        ("n", 129),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("top_logprobs", 5),
        ("max_tokens", 0),
        ("seed", 1.5),
        ("stop", 7),
    ],
)
def test_an_invalid_sampling_value_ends_the_server(caller: Caller, name: str, value: object):
    """vllm#5822: a 400 that names the parameter, and the next call works."""
    assert str(caller.error("count", **{name: value})["param"]).startswith(name)
    caller.works()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": "\xff"}',
        b'{"model": "scripted", "messages": [], "temperature": NaN}',
        b'{"model": "scripted", "messages": [], "temperature": 1e999}',
        b'{"model": "scripted", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
    ],
)
def test_a_malformed_body_is_a_server_error(caller: Caller, body: bytes):
    """sglang#3805, llama.cpp#11738: a 400 in OpenAI's shape, before a byte of a stream."""
    headers = {"content-type": "application/json"}
    error_of(caller.mesh.http.post(CHAT, content=body, headers=headers), 400)


def test_an_unsupported_format_is_a_server_error(caller: Caller):
    """llama.cpp#23463: a 400 that names it."""
    error = caller.error("count", response_format={"type": "no-such-format"})
    assert str(error["param"]).startswith("response_format")


def test_a_bad_request_for_a_stream_is_a_200(caller: Caller):
    """llama.cpp#14566: what can be checked is checked before the stream begins."""
    assert caller.error("count", stream=True, temperature=9)["param"] == "temperature"
    assert caller.error("word " * 5000, stream=True)["code"] == "context_length_exceeded"
    body = caller.body("count", stream=True) | {"model": "no-such-model"}
    assert error_of(caller.mesh.http.post(CHAT, json=body), 404)["code"] == "model_not_found"


def test_the_model_is_hidden_from_user_interfaces(caller: Caller):
    """exo#175: the list is an object with data, and its ids can be asked for."""
    listed = caller.mesh.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert MODEL in {model["id"] for model in listed["data"]}
    assert caller.mesh.http.get(f"/v1/models/{MODEL}").json()["object"] == "model"
