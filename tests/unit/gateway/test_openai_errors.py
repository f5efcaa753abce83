"""Errors as clients read them."""

from __future__ import annotations

import json

import pytest

from gateway.errors import AdmissionRefused, GenerationFailed, NotReady
from gateway.openai_errors import (
    QUOTED_CHARS_MAX,
    ApiError,
    context_length_exceeded,
    from_mesh_error,
    json_bytes,
    quoted,
    retry_after,
)
from shared.errors import CALLERS_FAULTS, LinkClosed, MeshError


def test_a_body_has_all_four_keys():
    """The specification requires them, null included."""
    body = json.loads(ApiError(400, "no", param="n", code="c").body())
    assert body == {"error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "c"}}


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "waits"),
    [
        (AdmissionRefused("queue_full", "full", retry_after_s=7), 429, "rate_limit_error", "rate_limit_exceeded", "7"),
        (
            AdmissionRefused("session_too_large", "never", retry_after_s=None),
            400,
            "invalid_request_error",
            "session_too_large",
            None,
        ),
        (NotReady("no_route", "layers 3:6 are missing"), 503, "server_error", "not_ready", "1"),
        (GenerationFailed("node_lost", "gone"), 503, "server_error", "node_lost", "1"),
        (LinkClosed("closed", "gone"), 503, "server_error", "closed", "1"),
    ],
)
def test_what_the_mesh_raises_has_a_status(error: MeshError, status: int, kind: str, code: str, waits: str | None):
    """Busy is 429, not ready and failed are 503, what can never fit is the caller's."""
    api_error = from_mesh_error(error)
    assert (api_error.status, api_error.kind, api_error.code) == (status, kind, code)
    assert api_error.headers.get("retry-after") == waits
    assert api_error.message == error.message


@pytest.mark.parametrize(("seconds", "header"), [(0, "1"), (1.2, "2"), (1e9, "60")])
def test_sdks_are_told_to_wait_no_longer_than_they_would(seconds: float, header: str):
    """Above their limit they would not retry at all."""
    assert retry_after(seconds) == {"retry-after": header}


def test_an_overflow_is_recognizable_and_has_the_true_numbers():
    """LiteLLM looks for the first words, people for the numbers."""
    error = context_length_exceeded(context_len=100, prompt_tokens=90, max_tokens=20, param="max_tokens")
    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    assert "maximum context length is 100 tokens" in error.message
    assert "90 tokens" in error.message
    assert "110 in all" in error.message
    prompt_alone = context_length_exceeded(context_len=100, prompt_tokens=100, max_tokens=None, param="max_tokens")
    assert "no room" in prompt_alone.message


@pytest.mark.parametrize("separator", ["\x85", "\u2028", "\u2029", "\n", "\r", "\x1e", "\x0b"])
def test_no_character_of_a_text_splits_a_line_of_json(separator: str):
    """Clients that use `splitlines` see one line, and the text comes back whole."""
    text = f"a{separator}\xe9b"
    data = json_bytes({"text": text})
    assert len(data.decode().splitlines()) == 1
    assert json.loads(data)["text"] == text


@pytest.mark.parametrize("code", sorted(CALLERS_FAULTS))
def test_what_the_caller_asked_for_and_no_node_can_do_is_a_400(code: str):
    """An SDK must not try it again."""
    error = from_mesh_error(GenerationFailed(code, "node-1 (12:24): the grammar is too complex"))
    assert (error.status, error.kind, error.code) == (400, "invalid_request_error", code)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a'b", '"a\'b"'),
        (None, "None"),
        (True, "True"),
        (1.5, "1.5"),
        ("a" * QUOTED_CHARS_MAX, "'" + "a" * (QUOTED_CHARS_MAX - 1) + "…"),
        ({"a": 1}, "an object"),
        (["a"], "an array"),
    ],
)
def test_a_callers_value_is_quoted_within_bounds(value: object, expected: str):
    """Strings are cut, and of containers only the kind is told."""
    assert quoted(value) == expected


def test_quoting_reads_no_more_of_a_string_than_it_shows():
    """A body may be one string of megabytes: what is not shown is not even looked at."""

    class Watched(str):
        __slots__ = ()

        def __repr__(self) -> str:
            raise AssertionError("the whole string was written out")

    assert quoted(Watched("x" * 1000)) == "'" + "x" * (QUOTED_CHARS_MAX - 1) + "…"
