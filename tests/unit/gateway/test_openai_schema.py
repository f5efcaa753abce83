"""The body of a chat completion: what passes, what is refused, and that a refusal names the parameter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from gateway.openai_errors import ApiError
from gateway.openai_parameters import HARMLESS, HONOURED, REFUSED, STREAM_OPTIONS_REFUSED
from gateway.openai_schema import ChatRequest, read_chat_request

BASE: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def read(**parameters: Any) -> ChatRequest:
    """The smallest body, and more."""
    return read_chat_request(json.dumps({**BASE, **parameters}).encode())


def refusal(data: bytes) -> ApiError:
    """The error that a body gives."""
    with pytest.raises(ApiError) as caught:
        read_chat_request(data)
    assert caught.value.status == 400
    assert caught.value.kind == "invalid_request_error"
    return caught.value


def refused(**parameters: Any) -> ApiError:
    """The error that these parameters give."""
    return refusal(json.dumps({**BASE, **parameters}).encode())


def test_the_smallest_body_leaves_everything_to_the_server():
    """Nothing is invented on the caller's behalf here."""
    request = read()
    assert request.messages == [{"role": "user", "content": "hi"}]
    sampling, answer = request.sampling, request.answer
    settings = (sampling.temperature, sampling.top_p, sampling.seed, answer.max_tokens, answer.stop)
    assert settings == (None, None, None, None, ())
    assert not request.stream
    assert not request.include_usage


def test_honoured_parameters_arrive():
    """Each at its place."""
    request = read(
        temperature=0.5, top_p=0.9, seed=-3, stop=["a", "b", "a"], max_tokens=5, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, request.answer.max_tokens) == (0.5, 0.9, -3, 5)
    assert (request.answer.stop, request.stream, request.include_usage) == (("a", "b"), True, True)


def test_max_completion_tokens_wins_over_max_tokens():
    """The newer name is the one that counts, and the one that a message names."""
    request = read(max_tokens=5, max_completion_tokens=7)
    assert (request.answer.max_tokens, request.answer.max_tokens_param) == (7, "max_completion_tokens")


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop_strings_in_any_spelling(stop: object):
    """Clients send null and empty lists."""
    assert read(stop=stop).answer.stop == ()


def test_a_single_stop_string_and_sixteen():
    """A string, or a list up to the limit."""
    assert read(stop="x").answer.stop == ("x",)
    assert len(read(stop=[str(index) for index in range(16)]).answer.stop) == 16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in ("x", -1, -0.1, 2.1, 1e308, True, [], {}, 10**30)],
        *[("top_p", value) for value in ("x", 0, 0.0, -1, 1.01, False, [0.5])],
        *[("top_k", value) for value in ("x", -2, 1.5, True)],
        *[("min_p", value) for value in ("x", -0.1, 1.1)],
        *[(name, value) for name in ("frequency_penalty", "presence_penalty") for value in ("x", -2.1, 3, False)],
        *[(name, value) for name in ("repetition_penalty", "repeat_penalty") for value in ("x", 0, -1, 101)],
        *[("n", value) for value in (0, 129, "2", True, 1.0)],
        *[("logprobs", value) for value in (0, 5, "true")],
        *[("top_logprobs", value) for value in (21, -1, "x", 5)],
        *[("min_tokens", value) for value in (-1, "x", 1.5)],
        *[("ignore_eos", value) for value in (1, "x")],
        *[("skip_special_tokens", value) for value in (0, "x")],
        *[("priority", value) for value in ("high", 1.5, 2**40)],
        *[("service_tier", value) for value in (1, {}, "x" * 65)],
        *[("seed", value) for value in ("1", 1.5, True, 2**63, -(2**63) - 1, [])],
        *[("max_tokens", value) for value in (0, -1, 1.5, "5", True, 2**40)],
        *[("max_completion_tokens", value) for value in (0, "x", False)],
        *[("stop", value) for value in ("", [""], 1, {}, ["x"] * 17, ["x" * 501])],
        *[("stream", value) for value in ("true", 1, [])],
        *[("model", value) for value in (None, 1, "", "x" * 600)],
        *[("messages", value) for value in (None, [], {}, "hi")],
        ("stream_options", {"include_usage": True}),
        ("stream_options", 1),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: object):
    """Wrong type, out of bounds, too many, too long."""
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
        ({"user": 1}, "user"),
        ({"store": "yes"}, "store"),
    ],
)
def test_what_is_wrong_inside_a_value_is_refused_by_its_path(parameters: dict[str, Any], param: str):
    """The caller is told where."""
    assert refused(**parameters).param == param


@pytest.mark.parametrize("name", ["model", "messages"])
def test_a_missing_required_parameter_is_refused_by_name(name: str):
    """Nothing can be done without them."""
    body = {key: value for key, value in BASE.items() if key != name}
    error = refusal(json.dumps(body).encode())
    assert (error.param, error.code) == (name, "missing_required_parameter")


def test_every_parameter_of_the_sdk_is_known():
    """A parameter that OpenAI's SDK can send is honoured, harmless or refused, never unknown."""
    known = {*HONOURED, *HARMLESS, *REFUSED}
    assert set(CompletionCreateParamsBase.__annotations__) <= known


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_parameter_that_is_not_supported_is_refused_unless_it_asks_for_nothing(name: str):
    """Null and neutral values pass, anything else is a 400 that names it."""
    for neutral in (None, *REFUSED[name].neutral):
        assert read(**{name: neutral}).unknown == ()
    error = refused(**{name: {"anything": "else"}})
    assert (error.param, error.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("name", "value"),
    [("best_of", 2), ("mirostat", False), ("dry_multiplier", 0.8), ("modalities", ["text", "audio"]), ("echo", True)],
)
def test_values_that_would_change_the_answer_are_refused(name: str, value: object):
    """False is not 0, and 0.8 is not 0."""
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize(("name", "value"), [("best_of", 1.0), ("dry_multiplier", 0.0), ("top_a", -0.0)])
def test_neutral_numbers_are_neutral_in_either_notation(name: str, value: object):
    """0 and 0.0 are the same number."""
    assert read(**{name: value}).unknown == ()


@pytest.mark.parametrize("name", sorted(STREAM_OPTIONS_REFUSED))
def test_stream_options_that_are_not_supported_are_refused_by_path(name: str):
    """As at the top level."""
    assert refused(stream=True, stream_options={name: True}).param == f"stream_options.{name}"
    assert read(stream=True, stream_options={name: False}).stream


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_harmless_parameters_are_accepted_and_their_types_checked(name: str):
    """Ignoring them changes nothing in the answer."""
    example = {str: "x", bool: True, dict: {"a": "b"}}[HARMLESS[name].types[0]]
    assert read(**{name: example}).unknown == ()
    assert read(**{name: None}).unknown == ()
    assert refused(**{name: 1.5}).param == name


@pytest.mark.parametrize("name", sorted(HONOURED.keys() - {"model", "messages"}))
def test_null_is_as_good_as_absent(name: str):
    """Clients send every field they know."""
    assert read(**{name: None}) == read()


def test_what_a_stream_and_its_call_are_to_be_like_arrives():
    """Options of the stream, the tier and the priority."""
    request = read(stream=True, stream_options={"continuous_usage_stats": True}, service_tier="auto", priority=-3)
    assert (request.continuous_usage, request.include_usage) == (True, False)
    assert (request.service_tier, request.priority) == ("auto", -3)


def test_unknown_fields_are_accepted_and_named():
    """Some client's own; they are logged."""
    assert read(my_own_field={"deep": [1]}, another=None).unknown == ("my_own_field", "another")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b'"x"', b'{"model": "m", ', b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "\\ud800"}',
        b'{"a": "\xff"}', b"\xef\xbb\xbf{}", b'{"a": Infinity}', b"{'a': 1}", b'{"a": 1}{}', b'{"a": "\x00"}',
        '{"a": 1}'.encode("utf-16"), b"[" * 100_000, b'{"a":' * 5_000, b'{"a": ' + b"9" * 5_000 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(data: bytes):
    """Truncated, of another encoding, too deep, or not JSON at all."""
    assert refusal(data).code == "invalid_json"


@given(st.dictionaries(st.sampled_from(sorted({*HONOURED, *HARMLESS, *REFUSED})), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)))  # fmt: skip
def test_any_value_for_any_parameter_is_read_or_refused(parameters: dict[str, Any]):
    """Nothing but an `ApiError` of status 400 ever comes out."""
    error = None
    try:
        read(**parameters)
    except ApiError as caught:
        error = caught
    assert error is None or (error.status, type(error.param)) == (400, str)
