"""Anthropic's Messages API over real HTTP, from a scripted generator."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.errors import AdmissionRefused, GenerationFailed, NotReady
from gateway.response_writer import StreamLimits
from tests.support.api_server import MODEL, ApiServer, running_api
from tests.support.fleet import wait_until
from tests.support.messages_validator import ValidMessageStream, check_error, check_message, validate_message_stream
from tests.support.scripted_generator import FOR_EVER
from tests.support.text_tokenizers import build_byte_level

TEXT = "Hell\u00f6 \u4f60\u597d, \U0001f600\u2028 the mesh.\n"
LOST = GenerationFailed("node_lost", "node-1 with layers 3:6 is gone")
KEEP_ALIVE_S = 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer."""
    return build_byte_level(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ApiServer]:
    """One server for all tests."""
    with running_api(model, stream_limits=StreamLimits(keep_alive_s=KEEP_ALIVE_S)) as running:
        yield running


@pytest.fixture
def api(server: ApiServer) -> ApiServer:
    """The server, with nothing scripted yet."""
    server.reset()
    return server


def post(api: ApiServer, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    """The smallest call, and more."""
    smallest = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
    return api.http.post(path, json={**smallest, **body})


def create(api: ApiServer, **body: Any) -> dict[str, Any]:
    """A message, checked."""
    response = post(api, **body)
    assert response.status_code == 200, response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]
    return check_message(response.json())


def stream(api: ApiServer, **body: Any) -> ValidMessageStream:
    """A streamed message, checked."""
    response = post(api, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return validate_message_stream(response.content)


def test_a_message(api: ApiServer):
    """Text, usage, and why it ended; a stream adds up to the same."""
    ids = api.answer_with(TEXT)
    message = create(api, system="be kind")
    assert message["content"] == [{"type": "text", "text": TEXT, "citations": None}]
    assert (message["stop_reason"], message["model"]) == ("end_turn", MODEL)
    assert message["usage"]["output_tokens"] == len(ids)
    assert message["usage"]["input_tokens"] == len(api.generator.requests[0].prompt_ids)
    streamed = stream(api, system="be kind").message
    assert {**streamed, "id": message["id"]} == message


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"stop_sequences": [" STOP"]}, ("stop_sequence", " STOP", "one")),
        ({"max_tokens": 1}, ("max_tokens", None, "o")),
    ],
)
def test_how_a_message_ends(api: ApiServer, body: dict[str, Any], expected: tuple[str, str | None, str]):
    """In both modes."""
    api.answer_with("one STOP two")
    for message in (create(api, **body), stream(api, **body).message):
        text = message["content"][0]["text"]
        assert (message["stop_reason"], message["stop_sequence"]) == expected[:2]
        assert text.startswith(expected[2])


def test_tokens_are_counted_without_generating(api: ApiServer):
    """As the message itself counts them."""
    api.answer_with("hi")
    counted = post(api, "/v1/messages/count_tokens", max_tokens=None, system="be kind").json()
    assert not api.generator.requests
    assert counted == {"input_tokens": create(api, system="be kind")["usage"]["input_tokens"]}


def test_silence_is_filled_with_pings(api: ApiServer):
    """From before the first token."""
    pause = asyncio.Event()
    ids = api.answer_with("hi")
    api.generator.script = lambda _request: [pause, *ids]
    api.in_loop(lambda: api.loop.call_later(2.5 * KEEP_ALIVE_S, pause.set))
    streamed = stream(api)
    assert streamed.pings >= 1
    assert streamed.text == "hi"


def test_a_failure_in_the_middle_is_an_error_event(api: ApiServer):
    """Nothing says that the message has ended."""
    ids = api.answer_with("hi there", end=False)
    api.generator.script = lambda _request: [*ids, LOST]
    streamed = stream(api)
    assert streamed.error == {"type": "overloaded_error", "message": LOST.message}
    assert streamed.text == "hi there"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (AdmissionRefused("queue_full", "64 generations wait", retry_after_s=7), (429, "rate_limit_error", "7")),
        (NotReady("no_route", "layers 3:6 are missing"), (529, "overloaded_error", "1")),
        (RuntimeError("secret"), (500, "api_error", None)),
    ],
)
def test_a_refusal_before_the_first_token_has_its_own_status(
    api: ApiServer, error: Exception, expected: tuple[int, str, str | None], streams: bool
):
    """In Anthropic's shape."""
    api.generator.admission = [error]
    response = post(api, stream=streams)
    kind = check_error(response.json())["type"]
    assert (response.status_code, kind, response.headers.get("retry-after")) == expected
    assert response.json()["request_id"] == response.headers["request-id"]


def test_every_error_has_anthropic_s_shape(api: ApiServer):
    """Also those that the endpoint never sees."""
    wrong = [
        (post(api, max_tokens=0), 400, "invalid_request_error"),
        (post(api, model="other"), 404, "not_found_error"),
        (post(api, "/v1/messages/batches"), 404, "not_found_error"),
        (api.http.get("/v1/messages"), 405, "invalid_request_error"),
        (api.http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"}), 400, None),
        (post(api, messages=[{"role": "user", "content": "x" * 100_000}]), 400, "invalid_request_error"),
    ]
    for response, status, kind in wrong:
        assert response.status_code == status
        assert check_error(response.json())["type"] == (kind or "invalid_request_error")
    assert "error" in api.http.get("/v1/nothing").json()
    assert "request-id" not in api.http.get("/v1/models").headers


def test_a_key_may_come_as_x_api_key(model: Path):
    """As Anthropic's clients send it; a wrong one is an `authentication_error`."""
    with running_api(model, api_keys=["secret"]) as api:
        api.answer_with("hi")
        body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert api.http.post("/v1/messages", json=body, headers=headers).status_code == 200
        for wrong in ({"x-api-key": "other"}, {}):
            refused = api.http.post("/v1/messages", json=body, headers=wrong)
            assert refused.status_code == 401
            assert check_error(refused.json())["type"] == "authentication_error"
            assert refused.headers["request-id"]


def test_a_client_that_leaves_ends_the_work(api: ApiServer):
    """On every node."""
    ids = api.answer_with("hi", end=False)
    for_ever = FOR_EVER()
    api.generator.script = lambda _request: [*ids, for_ever]
    body = {"model": MODEL, "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    with api.http.stream("POST", "/v1/messages", json=body) as response:
        next(response.iter_raw())
    wait_until(lambda: api.generator.active == 0, "the end of the generation", 1.0)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_empty_content_is_the_callers_fault(api: ApiServer, path: str):
    """A 400, in the API's own shape."""
    response = post(api, path, messages=[{"role": "user", "content": []}])
    assert response.status_code == 400
    assert "'messages'" in check_error(response.json())["message"]
