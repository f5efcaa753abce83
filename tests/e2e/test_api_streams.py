"""Streams under bad conditions: refusals, silence, failures in the middle, readers that do not read."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.errors import AdmissionRefused, GenerationFailed, NotReady
from gateway.response_writer import StreamLimits
from gateway.token_feed import FEED_TOKENS_MAX
from shared.errors import MeshError
from tests.support.api_server import ApiServer, running_api
from tests.support.fleet import wait_until
from tests.support.scripted_generator import FOR_EVER
from tests.support.stream_validator import ValidStream, validate_stream
from tests.support.text_tokenizers import build_byte_level

KEEP_ALIVE_S = 0.1
STALL_S = 0.6
LOST = GenerationFailed("node_lost", "node-1 with layers 3:6 is gone")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One impatient server for all tests."""
    limits = StreamLimits(keep_alive_s=KEEP_ALIVE_S, stall_s=STALL_S)
    with running_api(build_byte_level(tmp_path_factory.mktemp("model")), stream_limits=limits) as running:
        yield running


@pytest.fixture
def api(server: ApiServer) -> ApiServer:
    """The server, with nothing scripted yet."""
    server.reset()
    return server


def read_stream(api: ApiServer, **parameters: Any) -> ValidStream:
    """A streamed call, read to its end and validated."""
    with api.http.stream("POST", "/v1/chat/completions", json=api.body(stream=True, **parameters)) as response:
        assert response.status_code == 200
        return validate_stream(response.read())


REFUSALS = [
    (AdmissionRefused("queue_full", "64 generations wait", retry_after_s=7), (429, "rate_limit_exceeded", "7")),
    (NotReady("no_route", "layers 3:6 are missing"), (503, "not_ready", "1")),
    (LOST, (503, "node_lost", "1")),
    (AdmissionRefused("session_too_large", "never fits", retry_after_s=None), (400, "session_too_large", None)),
]


@pytest.mark.parametrize(("error", "expected"), REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_before_the_first_token_has_its_own_status(
    api: ApiServer, error: MeshError, expected: tuple[int, str, str | None], stream: bool
):
    """429 and 503 with `retry-after`, also when a stream was asked for."""
    api.generator.admission = [error]
    response = api.chat(stream=stream)
    code = response.json()["error"]["code"]
    assert (response.status_code, code, response.headers.get("retry-after")) == expected
    assert response.headers["content-type"] == "application/json"
    assert "x-should-retry" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_retries_a_refusal_by_itself(api: ApiServer, stream: bool):
    """It waits as told, and the second attempt is served."""
    ids = api.answer_with("hi")
    api.generator.admission = [AdmissionRefused("queue_full", "full", retry_after_s=1)]
    original = api.generator.script

    def generation_then_room(request: object) -> list[int]:
        return list(original(request))  # type: ignore[arg-type]

    api.generator.script = generation_then_room
    client = api.client(max_retries=1)
    api.in_loop(lambda: api.loop.call_later(0.3, api.generator.admission.clear))
    answer = client.chat.completions.create(**api.body(stream=stream))
    text = "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content
    assert text == "hi"
    assert len(api.generator.requests) == 2
    assert len(ids) > 1


def test_comments_are_sent_while_there_is_nothing_to_say(api: ApiServer):
    """From the moment the headers are out, and between tokens; the SDK does not notice them."""
    pauses = [asyncio.Event(), asyncio.Event()]
    api.generator.script = lambda _request: [pauses[0], 74, pauses[1], 75, 2]
    with api.http.stream("POST", "/v1/chat/completions", json=api.body(stream=True)) as response:
        assert response.status_code == 200
        body, parts = b"", response.iter_bytes()
        for said, pause in ((b"", pauses[0]), (b'"content"', pauses[1])):
            before = body.count(b"\n:") + body.startswith(b":")
            while said not in body or body.count(b"\n:") + body.startswith(b":") < before + 2:
                body += next(parts)
            api.in_loop(pause.set)
        stream = validate_stream(body + b"".join(parts))
    assert stream.comments >= 4
    assert stream.finish_reason == "stop"
    for pause in pauses:
        pause.clear()
        api.in_loop(lambda pause=pause: api.loop.call_later(2.5 * KEEP_ALIVE_S, pause.set))
    chunks = list(api.client().chat.completions.create(**api.body(), stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_comments_are_sent_while_only_hidden_tokens_come(api: ApiServer):
    """A model that writes special tokens alone does not leave its reader in silence."""
    ticks = [asyncio.Event() for _ in range(30)]

    def tick(index: int) -> None:
        ticks[index].set()
        if index + 1 < len(ticks):
            api.loop.call_later(KEEP_ALIVE_S / 5, tick, index + 1)

    api.generator.script = lambda _request: [74, *(step for event in ticks for step in (event, 1)), 2]
    api.in_loop(lambda: tick(0))
    stream = read_stream(api)
    assert stream.comments >= 2
    assert len(stream.chunks) == 3


def test_headers_wait_for_the_first_token_or_the_first_comment(api: ApiServer):
    """A failure after the first comment can only be an error frame."""
    wait = asyncio.Event()
    api.generator.admission = [wait, NotReady("no_route", "layers 3:6 are missing")]
    api.in_loop(lambda: api.loop.call_later(2.5 * KEEP_ALIVE_S, wait.set))
    stream = read_stream(api)
    assert stream.comments >= 1
    assert stream.error is not None
    assert (stream.error["type"], stream.error["code"]) == ("server_error", "not_ready")
    assert not stream.chunks


def test_a_non_streaming_call_waits_in_silence(api: ApiServer):
    """Keep-alive is for streams; the answer comes whole."""
    pause = asyncio.Event()
    ids = api.answer_with("hi")
    api.generator.script = lambda _request: [pause, *ids]
    api.in_loop(lambda: api.loop.call_later(2.5 * KEEP_ALIVE_S, pause.set))
    assert api.chat().json()["choices"][0]["message"]["content"] == "hi"


@pytest.mark.parametrize("failure", [LOST, RuntimeError("secret")])
def test_a_failure_in_the_middle_is_one_error_frame_and_the_end(api: ApiServer, failure: Exception):
    """The text before it is delivered, nothing says `stop`, and nothing of ours is revealed."""
    ids = api.answer_with("hi there", end=False)
    api.generator.script = lambda _request: [*ids, failure]
    stream = read_stream(api)
    assert stream.text == "hi there"
    assert stream.error is not None
    assert stream.error["type"] == "server_error"
    assert "secret" not in str(stream.error)


def test_the_sdk_raises_on_a_failure_in_the_middle(api: ApiServer):
    """With the code, after the text."""
    ids = api.answer_with("hi", end=False)
    api.generator.script = lambda _request: [*ids, LOST]
    text = ""
    with pytest.raises(openai.APIError) as caught:  # noqa: PT012 - the text comes first
        for chunk in api.client().chat.completions.create(**api.body(), stream=True):
            text += chunk.choices[0].delta.content or ""
    assert (text, caught.value.code) == ("hi", "node_lost")


def test_a_failure_after_tokens_of_a_plain_call_is_not_to_be_retried(api: ApiServer):
    """The SDK would only do all the work again."""
    ids = api.answer_with("hi", end=False)
    api.generator.script = lambda _request: [*ids, LOST]
    response = api.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "node_lost")
    assert response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.APIStatusError):
        api.client(max_retries=2).chat.completions.create(**api.body())
    assert len(api.generator.requests) == 2


def test_a_generation_that_stops_short_is_an_error(api: ApiServer):
    """Neither an end token nor the limit: it must not look finished."""
    ids = api.answer_with("hi", end=False)
    api.generator.script = lambda _request: ids
    assert read_stream(api).error is not None
    assert api.chat().status_code == 503


def test_streams_have_the_headers_that_proxies_need(api: ApiServer):
    """Nothing buffers, compresses or caches them, and the connection can be used again."""
    api.answer_with("hi")
    response = api.chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    assert "content-encoding" not in response.headers
    assert response.headers["transfer-encoding"] == "chunked"


def test_a_reader_that_does_not_read_stops_the_generation(api: ApiServer):
    """It runs ahead by what sockets and feed hold, waits, and ends when nothing has been taken for too long."""
    drawn_at = [0.0]

    def draw() -> int:
        drawn_at[0] = time.monotonic()
        return 74

    api.generator.script = lambda _request: iter(draw, None)
    api.state.tokenizer.context_len = 10**9
    try:
        with api.send_call(api.connect(receive_buffer=4096), stream=True):
            wait_until(lambda: api.generator.yielded > FEED_TOKENS_MAX, "the stream to begin")
            wait_until(lambda: api.generator.ends, "the end of the generation", 20 + 10 * STALL_S)
            assert time.monotonic() - drawn_at[0] >= 0.9 * STALL_S, "it went on while nobody read"
            assert api.generator.active == 0
            assert api.generator.ends == ["cancelled"]
    finally:
        api.state.tokenizer.context_len = 256


def test_a_slow_reader_gets_everything(api: ApiServer):
    """Waiting for it loses nothing."""
    api.generator.script = lambda _request: [74] * 3000
    api.state.tokenizer.context_len = 4000
    try:
        with api.http.stream("POST", "/v1/chat/completions", json=api.body(stream=True, max_tokens=3000)) as response:
            body = b"".join(response.iter_raw(1000))
        assert len(validate_stream(body).text) == 3000
    finally:
        api.state.tokenizer.context_len = 256


def test_a_server_told_to_end_finishes_streams_or_says_so(tmp_path: Path):
    """Within the time for draining; then open streams get an error frame, not silence."""
    with running_api(build_byte_level(tmp_path)) as api:
        api.generator.script = lambda _request: [74, 75, FOR_EVER()]
        bodies: list[bytes] = []

        def call() -> None:
            response = httpx.post(f"{api.url}/v1/chat/completions", json=api.body(stream=True), timeout=20)
            bodies.append(response.content)

        caller = threading.Thread(target=call)
        caller.start()
        wait_until(lambda: api.generator.yielded == 2, "the stream to begin")
    caller.join(10)
    stream = validate_stream(bodies[0])
    assert stream.text
    assert stream.error is not None
    assert "shutting down" in stream.error["message"]
    assert api.generator.active == 0
