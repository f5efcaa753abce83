"""Answers whose encoding takes long, over real HTTP: nobody else waits for them, and none is made for nobody."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from gateway.answer_threads import encode
from gateway.chat_encoder import logprobs_json
from gateway.logprobs import LogprobEntry
from gateway.request_record import ClientLeft
from tests.support.api_server import MODEL, ApiServer, running_api
from tests.support.completion_calls import choices, complete, stream
from tests.support.fleet import wait_until
from tests.support.scripted_scores import answers, prompt_scores
from tests.support.text_tokenizers import build_byte_level

WAIT_S = 5.0
BODY = {"prompt": ["The mesh", "b"], "n": 2, "max_tokens": 3, "logprobs": 2, "echo": True}
ROWS = "gateway.completions.encoder.rows_json"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One server for all tests."""
    with running_api(build_byte_level(tmp_path_factory.mktemp("model"))) as running:
        yield running


@pytest.fixture
def api(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> ApiServer:
    """The server, to which every answer is a large one."""
    server.reset()
    server.generator.scores, server.generator.script = prompt_scores, answers
    monkeypatch.setattr("gateway.answer_threads.INLINE_TOKENS_MAX", 0)
    return server


def test_answers_are_the_same_from_a_thread(api: ApiServer, monkeypatch: pytest.MonkeyPatch):
    """Whole and streamed, to the byte but for what identifies them."""
    large = (choices(api, **BODY), stream(api, **BODY).choices)
    monkeypatch.undo()
    assert large == (choices(api, **BODY), stream(api, **BODY).choices)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_other_calls_are_answered_meanwhile(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch, streamed: bool, max_tokens: int
):
    """Encoding goes on only after another call has had its answer."""
    encoding, answered = threading.Event(), threading.Event()

    def rows(_rows: object) -> dict[str, object]:
        encoding.set()
        assert answered.wait(WAIT_S)
        return {}

    monkeypatch.setattr(ROWS, rows)
    body = {**BODY, "stream": streamed, "max_tokens": max_tokens}
    statuses: list[int] = []
    caller = threading.Thread(target=lambda: statuses.append(complete(api, **body).status_code))
    caller.start()
    assert encoding.wait(WAIT_S)
    assert api.http.get("/healthz", timeout=WAIT_S / 2).status_code == 200
    answered.set()
    caller.join(WAIT_S)
    assert statuses == [200]


def test_chat_completions_of_many_choices_are_no_exception(api: ApiServer, monkeypatch: pytest.MonkeyPatch):
    """They have as many log-probabilities."""
    threads: list[str] = []

    def recorded(entries: Sequence[LogprobEntry]) -> dict[str, object]:
        threads.append(threading.current_thread().name)
        return logprobs_json(entries)

    monkeypatch.setattr("gateway.chat_encoder.logprobs_json", recorded)
    assert api.chat(n=3, max_tokens=2, logprobs=True, top_logprobs=2).status_code == 200
    assert [name.split("_")[0] for name in threads] == ["answer"] * 3


def test_encoding_ends_when_the_caller_has_gone(api: ApiServer, monkeypatch: pytest.MonkeyPatch):
    """Before the next choice."""
    encoding = threading.Event()
    gone: list[threading.Event] = []
    calls: list[object] = []
    ends: list[type[BaseException]] = []

    def rows(rows: object) -> dict[str, object]:
        calls.append(rows)
        encoding.set()
        assert gone[0].wait(WAIT_S)
        return {}

    async def recorded(parts: Any, **options: Any) -> bytes:
        gone.append(options["gone"])
        try:
            return await encode(parts, **options)
        except BaseException as error:
            ends.append(type(error))
            raise

    monkeypatch.setattr(ROWS, rows)
    monkeypatch.setattr("gateway.answer_response.encode", recorded)
    data = json.dumps({"model": MODEL, **BODY}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection = api.connect()
    connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    assert encoding.wait(WAIT_S)
    connection.close()
    wait_until(lambda: bool(ends), "the end of the encoding")
    assert ends == [ClientLeft]
    assert len(calls) == 1
