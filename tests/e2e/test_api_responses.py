"""The Responses API over real HTTP, with the real SDK in its strictest mode, from a scripted generator."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from gateway.errors import GenerationFailed
from gateway.response_writer import StreamLimits
from tests.support.api_server import MODEL, ApiServer, running_api
from tests.support.fleet import wait_until
from tests.support.responses_validator import (
    ValidResponseStream,
    check_response,
    output_text,
    validate_response_stream,
)
from tests.support.scripted_generator import FOR_EVER
from tests.support.text_tokenizers import build_byte_level

TEXT = "Hell\u00f6 \u4f60\u597d, \U0001f600\u2028 the mesh.\n"
LOST = GenerationFailed("node_lost", "node-1 with layers 3:6 is gone")
KEEP_ALIVE_S = 0.1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One server for all tests."""
    limits = StreamLimits(keep_alive_s=KEEP_ALIVE_S)
    with running_api(build_byte_level(tmp_path_factory.mktemp("model")), stream_limits=limits) as running:
        yield running


@pytest.fixture
def api(server: ApiServer) -> ApiServer:
    """The server, with nothing scripted yet."""
    server.reset()
    return server


@pytest.fixture
def client(api: ApiServer) -> Iterator[openai.OpenAI]:
    """The SDK, strict, with its connections closed at the end."""
    with api.client() as opened:
        yield opened


def post(api: ApiServer, **body: Any) -> httpx.Response:
    """The smallest call, and more."""
    return api.http.post("/v1/responses", json={"model": MODEL, "input": "hi", **body})


def create(api: ApiServer, **body: Any) -> dict[str, Any]:
    """A response, checked."""
    response = post(api, **body)
    assert response.status_code == 200, response.text
    return check_response(response.json())


def stream(api: ApiServer, **body: Any) -> ValidResponseStream:
    """A streamed response, checked."""
    response = post(api, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return validate_response_stream(response.content)


def last_prompt(api: ApiServer) -> str:
    """What the last generation was asked to continue."""
    return api.tokenizer.decode(api.generator.requests[-1].prompt_ids)


def test_the_sdk_reads_a_response(api: ApiServer, client: openai.OpenAI):
    """Text, usage, and what it was asked."""
    ids = api.answer_with(TEXT)
    response = client.responses.create(model="alias", input="hi", temperature=0, metadata={"a": "b"})
    assert (response.output_text, response.status, response.model) == (TEXT, "completed", MODEL)
    assert (response.temperature, response.metadata) == (0, {"a": "b"})
    assert response.usage is not None
    assert response.usage.output_tokens == len(ids)
    assert response.usage.input_tokens == len(api.generator.requests[0].prompt_ids)
    assert api.generator.requests[0].choices[0].temperature == 0


def test_a_stream_says_what_a_body_says(api: ApiServer):
    """The same text, event by event."""
    api.answer_with(TEXT)
    streamed = stream(api)
    assert streamed.text == output_text(create(api)) == TEXT
    assert streamed.comments == 0


def test_the_sdk_accumulates_a_stream(api: ApiServer, client: openai.OpenAI):
    """Raw events, and the helper."""
    api.answer_with(TEXT)
    events = list(client.responses.create(model=MODEL, input="hi", stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    with client.responses.stream(model=MODEL, input="hi") as helper:
        assert helper.get_final_response().output_text == TEXT


def test_the_end_of_max_output_tokens_is_incomplete(api: ApiServer):
    """With its reason, in both modes."""
    api.generator.script = lambda _request: [70] * 100
    body = create(api, max_output_tokens=3)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    streamed = stream(api, max_output_tokens=3)
    assert (streamed.names[-1], streamed.text) == ("response.incomplete", output_text(body))


def test_a_response_goes_on_from_a_previous_one(api: ApiServer, client: openai.OpenAI):
    """Its input and output come first, its instructions do not."""
    api.answer_with("first answer")
    first = client.responses.create(model=MODEL, input="first question", instructions="old rules")
    second = client.responses.create(
        model=MODEL, input="second question", previous_response_id=first.id, instructions="new rules"
    )
    prompt = last_prompt(api)
    assert [word in prompt for word in ("first question", "first answer", "second question", "new rules")] == [True] * 4
    assert "old rules" not in prompt
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["message"] * 3
    assert second.previous_response_id == first.id
    client.responses.create(
        model=MODEL,
        input=[{"type": "item_reference", "id": first.output[0].id or ""}, {"role": "user", "content": "?"}],
    )
    assert "first answer" in last_prompt(api)


def test_input_items_come_in_pages(api: ApiServer, client: openai.OpenAI):
    """The SDK goes through all of them."""
    api.answer_with("x")
    texts = [f"message {number}" for number in range(5)]
    first = client.responses.create(model=MODEL, input=[{"role": "user", "content": text} for text in texts])
    for order, expected in (("asc", texts), ("desc", texts[::-1])):
        found = client.responses.input_items.list(first.id, limit=2, order=order)  # type: ignore[arg-type]
        assert [item.content[0].text for item in found] == expected  # type: ignore[union-attr]
    for query in ("limit=0", "limit=x", "order=up", "after=nothing"):
        response = api.http.get(f"/v1/responses/{first.id}/input_items?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_a_stored_response_can_be_read_and_deleted(api: ApiServer, client: openai.OpenAI):
    """Then it is gone, and what continues it cannot be continued."""
    api.answer_with("hi")
    first = client.responses.create(model=MODEL, input="hi")
    second = client.responses.create(model=MODEL, input="hi", previous_response_id=first.id)
    assert client.responses.retrieve(first.id) == first
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="in memory only") as raised:
            call(first.id)
        assert raised.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError, match="Send the whole conversation") as raised:
        client.responses.create(model=MODEL, input="hi", previous_response_id=second.id)
    assert (raised.value.code, raised.value.param) == ("previous_response_not_found", "previous_response_id")


def test_what_is_not_to_be_stored_is_not(api: ApiServer):
    """`store: false`, in both modes."""
    api.answer_with("hi")
    for body in (create(api, store=False), stream(api, store=False).final):
        assert body["store"] is False
        assert api.http.get(f"/v1/responses/{body['id']}").status_code == 404


def test_a_streamed_response_is_stored_before_it_ends(api: ApiServer):
    """Its caller may go on at once."""
    api.answer_with("streamed words")
    final = stream(api).final
    assert api.http.get(f"/v1/responses/{final['id']}").json() == final
    create(api, previous_response_id=final["id"])
    assert "streamed words" in last_prompt(api)


def hang_after(api: ApiServer, text: str) -> None:
    """Script an answer that says this and then nothing for ever."""
    ids = api.answer_with(text, end=False)
    for_ever = FOR_EVER()
    api.generator.script = lambda _request: [*ids, for_ever]


def test_a_running_stream_can_be_looked_at_and_cancelled(api: ApiServer, client: openai.OpenAI):
    """Its generation ends on every node, and its reader gets what there is."""
    hang_after(api, "so far")
    body = {"model": MODEL, "input": "hi", "stream": True}
    with api.http.stream("POST", "/v1/responses", json=body) as response, httpx.Client(base_url=api.url) as other:
        chunks = response.iter_raw()
        seen = next(chunks)
        response_id = seen.split(b'"id":"', 1)[1].split(b'"', 1)[0].decode()
        wait_until(lambda: output_text(other.get(f"/v1/responses/{response_id}").json()) == "so far", "the words", 5.0)
        assert check_response(other.get(f"/v1/responses/{response_id}").json())["status"] == "in_progress"
        stopped = check_response(other.post(f"/v1/responses/{response_id}/cancel").json())
        rest = b"".join(chunks)
    streamed = validate_response_stream(seen + rest)
    assert stopped["status"] == streamed.final["status"] == "cancelled"
    assert streamed.text == "so far"
    wait_until(lambda: api.generator.active == 0, "the end of the generation", 1.0)
    assert api.generator.ends == ["cancelled"]
    again = client.responses.cancel(response_id)
    assert (again.status, again.output_text) == ("cancelled", "so far")


@pytest.mark.parametrize(("streams", "said"), [(False, ""), (True, ""), (False, "so far")])
def test_a_call_that_is_cancelled_before_anything_was_sent_is_answered(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch, streams: bool, said: str
):
    """With the cancelled response, in the form that was asked for."""
    monkeypatch.setattr("gateway.api.responses.mint_response_id", lambda: "resp_known")
    hang_after(api, said)
    with ThreadPoolExecutor(1) as threads, httpx.Client(base_url=api.url) as other:
        call = threads.submit(post, api, stream=streams)
        wait_until(lambda: api.generator.active, "a generation")
        wait_until(lambda: said == output_text(other.get("/v1/responses/resp_known").json()), "its words")
        assert other.post("/v1/responses/resp_known/cancel").status_code == 200
        answered = call.result(timeout=5)
    assert answered.status_code == 200
    final = validate_response_stream(answered.content).final if streams else check_response(answered.json())
    assert (final["status"], final["id"]) == ("cancelled", "resp_known")
    assert output_text(final) == said


def test_what_has_ended_cannot_be_cancelled(api: ApiServer):
    """A 400, as OpenAI has it."""
    api.answer_with("hi")
    first = create(api)
    response = api.http.post(f"/v1/responses/{first['id']}/cancel")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "response_not_running")


def test_what_a_stored_response_includes_was_decided_when_it_was_made(api: ApiServer, client: openai.OpenAI):
    """Asking for what this server knows is fine, for anything else is a 400."""
    api.answer_with("hi")
    first = client.responses.create(model=MODEL, input="hi")
    assert client.responses.retrieve(first.id, include=["message.output_text.logprobs"]) == first
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.retrieve(first.id, include=["file_search_call.results"])
    assert raised.value.param == "include[0]"


def test_events_are_not_stored(api: ApiServer):
    """A stored response is not streamed again."""
    api.answer_with("hi")
    first = create(api)
    response = api.http.get(f"/v1/responses/{first['id']}?stream=true")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_parameter")


@pytest.mark.parametrize("failure", [LOST, RuntimeError("secret")])
def test_a_failure_in_the_middle_is_a_failed_response(api: ApiServer, client: openai.OpenAI, failure: Exception):
    """What there was is in it, the SDK raises, and nothing of ours is revealed."""
    ids = api.answer_with("hi there", end=False)
    api.generator.script = lambda _request: [*ids, failure]
    streamed = stream(api)
    assert (streamed.final["status"], streamed.text) == ("failed", "hi there")
    assert "secret" not in str(streamed.events)
    assert api.http.get(f"/v1/responses/{streamed.final['id']}").json()["status"] == "failed"
    with pytest.raises(openai.APIError) as raised:
        list(client.responses.create(model=MODEL, input="hi", stream=True))
    assert raised.value.code == ("node_lost" if failure is LOST else "internal_error")
    with client.responses.stream(model=MODEL, input="hi") as helper, pytest.raises(openai.APIError):
        helper.get_final_response()


@pytest.mark.parametrize("streams", [False, True])
def test_a_failure_before_the_first_token_has_its_own_status(api: ApiServer, streams: bool):
    """And leaves nothing behind."""
    api.generator.admission = [LOST]
    response = post(api, stream=streams)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "node_lost")


def test_silence_is_filled_with_comments(api: ApiServer):
    """Which no client shows."""
    pause = asyncio.Event()
    ids = api.answer_with("hi")
    api.generator.script = lambda _request: [pause, *ids]
    api.in_loop(lambda: api.loop.call_later(2.5 * KEEP_ALIVE_S, pause.set))
    streamed = stream(api)
    assert streamed.comments >= 1
    assert streamed.text == "hi"


def test_a_client_that_leaves_ends_the_work(api: ApiServer):
    """And the response is not known any more."""
    hang_after(api, "hi")
    with api.http.stream("POST", "/v1/responses", json={"model": MODEL, "input": "hi", "stream": True}) as response:
        first = next(response.iter_raw())
    response_id = first.split(b'"id":"', 1)[1].split(b'"', 1)[0].decode()
    wait_until(lambda: api.generator.active == 0, "the end of the generation", 1.0)
    wait_until(lambda: api.http.get(f"/v1/responses/{response_id}").status_code == 404, "its end", 1.0)


def test_tokens_are_counted_without_generating(api: ApiServer, client: openai.OpenAI):
    """As the response itself counts them."""
    api.answer_with("hi")
    counted = client.responses.input_tokens.count(model=MODEL, input="hi", instructions="be kind")
    assert not api.generator.requests
    response = client.responses.create(model=MODEL, input="hi", instructions="be kind")
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens


def test_nothing_is_compacted(api: ApiServer):
    """A 404 that says so, and not that there is no such method."""
    response = api.http.post("/v1/responses/compact", json={"model": MODEL, "input": "hi"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")


def test_errors_speak_of_the_input(api: ApiServer):
    """Where a chat completion has messages."""
    too_long = post(api, input="x" * 100_000).json()["error"]
    assert (too_long["code"], too_long["param"]) == ("context_length_exceeded", "input")
    limit = post(api, max_output_tokens=2**30).json()["error"]
    assert (limit["code"], limit["param"]) == ("context_length_exceeded", "input")
    assert "max_output_tokens" in limit["message"]
    unknown = post(api, model="other").json()["error"]
    assert unknown["code"] == "model_not_found"
