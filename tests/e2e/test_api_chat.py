"""Chat completions over real HTTP, with the real SDK in its strictest mode, from a scripted generator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import structlog.testing

from gateway.turn_sampling import wire_seed
from tests.support.api_server import MODEL, ApiServer, running_api
from tests.support.fleet import wait_until
from tests.support.text_tokenizers import CONTEXT_LEN, build_byte_level, build_metaspace

TEXT = "Hell\u00f6 \u4f60\u597d, \U0001f600\u2028 the mesh.\n"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer."""
    return build_byte_level(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ApiServer]:
    """One server for all tests."""
    with running_api(model) as running:
        yield running


@pytest.fixture
def api(server: ApiServer) -> ApiServer:
    """The server, with nothing scripted yet."""
    server.reset()
    return server


def test_a_plain_answer(api: ApiServer):
    """Status 200, text, finish reason and usage as the SDK reads them."""
    ids = api.answer_with(TEXT)
    completion = api.client().chat.completions.create(**api.body())
    (choice,) = completion.choices
    assert (choice.message.content, choice.finish_reason, choice.index) == (TEXT, "stop", 0)
    assert completion.model == MODEL
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len(ids)
    assert completion.usage.prompt_tokens == len(api.generator.requests[0].prompt_ids)
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + len(ids)


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_streamed_answer(api: ApiServer, include_usage: bool):
    """The same text, in the order and shape that every client depends on."""
    ids = api.answer_with(TEXT)
    stream = api.stream(stream_options={"include_usage": include_usage})
    assert (stream.text, stream.finish_reason) == (TEXT, "stop")
    if include_usage:
        assert stream.usage is not None
        assert stream.usage["completion_tokens"] == len(ids)


def test_the_sdk_reads_the_stream_both_ways(api: ApiServer):
    """Raw chunks, and the helper that accumulates them."""
    api.answer_with(TEXT)
    chunks = list(api.client().chat.completions.create(**api.body(), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    with api.client().chat.completions.stream(**api.body(), stream_options={"include_usage": True}) as events:
        completion = events.get_final_completion()
    assert completion.choices[0].message.content == TEXT
    assert completion.choices[0].message.role == "assistant"
    assert completion.usage is not None


async def test_the_async_sdk(api: ApiServer):
    """The same over asyncio."""
    api.answer_with(TEXT)
    async with openai.AsyncOpenAI(
        base_url=f"{api.url}/v1", api_key="x", _strict_response_validation=True, max_retries=0
    ) as client:
        stream = await client.chat.completions.create(model="default", messages=MESSAGES, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT


@pytest.mark.parametrize("build", [build_byte_level, build_metaspace])
def test_random_tokens_give_the_same_text_in_both_modes(tmp_path: Path, build: object):
    """Invalid UTF-8, special tokens, unknown ids, stop strings across borders: stream and whole agree."""
    rng = random.Random(7)
    with running_api(build(tmp_path)) as api:  # type: ignore[operator]
        for _ in range(25):
            ids = [rng.randrange(3, 420) for _ in range(60)]
            api.generator.script = lambda _request, ids=ids: ids
            stop = rng.sample(["e", "th", "a\n", " ", "mesh", "\ufffd"], 2)
            parameters = {"max_tokens": 60, "stop": stop}
            choice = api.chat(**parameters).json()["choices"][0]
            stream = api.stream(**parameters)
            assert (stream.text, stream.finish_reason) == (choice["message"]["content"], choice["finish_reason"])
            assert not any(one in stream.text for one in stop)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_character_cut_by_the_limit_is_dropped_in_both_modes(api: ApiServer, tokens: int):
    """No U+FFFD, no half."""
    table = {piece: index for index in range(400) if len(piece := api.tokenizer.detokenizer([])._piece(index)) == 1}
    ids = [table[bytes([byte])] for byte in "\U0001f600".encode()]
    api.generator.script = lambda _request: ids
    choice = api.chat(max_tokens=tokens).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    stream = api.stream(max_tokens=tokens)
    assert (stream.text, stream.finish_reason) == ("", "length")


def test_a_stop_string_ends_the_generation_on_the_nodes(api: ApiServer):
    """What comes after it is neither shown nor computed."""
    ids = api.tokenizer.encode_text("one STOP two")
    api.generator.script = lambda _request: [*ids, *[70] * 100_000]
    for stream in (False, True):
        if stream:
            assert api.stream(stop=" STOP", max_tokens=200).text == "one"
        else:
            assert api.chat(stop=[" STOP"], max_tokens=200).json()["choices"][0]["message"]["content"] == "one"
        wait_idle(api)
        assert api.generator.ends[-1] == "cancelled"
    assert api.generator.yielded < 1000


def wait_idle(api: ApiServer) -> None:
    """Until no generation runs."""
    wait_until(lambda: api.generator.active == 0, "the end of all generations", 1.0)


def test_end_tokens_are_counted_and_never_shown(api: ApiServer):
    """As vLLM counts; the end-of-turn token is generated like any other."""
    ids = api.answer_with("hi")
    body = api.chat().json()
    assert body["choices"][0]["message"]["content"] == "hi"
    assert body["usage"]["completion_tokens"] == len(ids)


def test_an_empty_answer_is_an_empty_string(api: ApiServer):
    """Not null: nothing else says that there was an answer."""
    api.answer_with("")
    assert api.chat().json()["choices"][0]["message"]["content"] == ""
    assert api.stream().text == ""


def test_sampling_parameters_reach_the_generator(api: ApiServer):
    """And a seed that does not fit the wire is hashed, the same way each time."""
    api.answer_with("x")
    api.chat(temperature=0.25, top_p=0.5, seed=42, max_completion_tokens=7)
    request = api.generator.requests[-1]
    assert (request.choices[0].temperature, request.choices[0].top_p, request.choices[0].seed) == (0.25, 0.5, 42)
    assert (request.max_tokens, request.eos_ids) == (7, api.tokenizer.eos_ids)
    api.chat(seed=-1, temperature=1e-9)
    api.chat(seed=-1)
    first, second = api.generator.requests[-2:]
    assert first.choices[0].seed == second.choices[0].seed == wire_seed(-1) < 2**53
    assert first.choices[0].temperature == 0


def test_without_parameters_the_defaults_hold_and_seeds_differ(api: ApiServer):
    """Temperature and top_p 1, the rest of the window, and no two calls alike."""
    api.answer_with("x")
    api.chat()
    api.chat()
    first, second = api.generator.requests
    assert (first.choices[0].temperature, first.choices[0].top_p) == (1.0, 1.0)
    assert first.max_tokens == CONTEXT_LEN - len(first.prompt_ids)
    assert first.choices[0].seed != second.choices[0].seed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("words", "max_tokens"), [(500, None), (2, 300), (500, 5)])
def test_an_overflow_is_a_400_with_true_numbers_before_any_byte(
    api: ApiServer, stream: bool, words: int, max_tokens: int | None
):
    """Also when streaming, and nothing is generated."""
    messages = [{"role": "user", "content": "mesh " * words}]
    response = api.chat(messages=messages, max_tokens=max_tokens, stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert f"maximum context length is {CONTEXT_LEN} tokens" in error["message"]
    prompt_tokens = len(api.tokenizer.encode_chat(messages))
    assert f"{prompt_tokens} tokens" in error["message"]
    assert not api.generator.requests


def test_an_answer_that_fills_the_window_exactly_is_allowed(api: ApiServer):
    """To the last position."""
    room = CONTEXT_LEN - len(api.tokenizer.encode_chat(MESSAGES))
    api.generator.script = lambda _request: [70] * CONTEXT_LEN
    assert api.chat(max_tokens=room).json()["usage"]["total_tokens"] == CONTEXT_LEN
    assert api.chat(max_tokens=room + 1).status_code == 400


def test_sixteen_streams_at_once_do_not_mix(api: ApiServer):
    """Each answer depends on its own prompt alone."""
    api.generator.script = lambda request: [*request.prompt_ids[4:-6], 2]

    def ask(index: int) -> tuple[str, str]:
        stream = api.stream(messages=[{"role": "user", "content": f"prompt {index} \u4f60\U0001f600"}])
        return f"prompt {index} \u4f60\U0001f600", stream.text

    with ThreadPoolExecutor(16) as pool:
        for sent, got in pool.map(ask, range(64)):
            assert sent[:8] in f"{got} {sent}"
            assert sent[-2:] in got


def test_unknown_fields_are_accepted_and_logged_by_name(api: ApiServer):
    """With no value of theirs."""
    api.answer_with("x")
    with structlog.testing.capture_logs() as events:
        assert api.chat(my_field="secret").status_code == 200
    (event,) = [event for event in events if event["event"] == "request.unknown_fields"]
    assert event["names"] == ["my_field"]
    assert "secret" not in str(events)


def test_one_log_line_tells_the_whole_call(api: ApiServer):
    """Figures, and nothing of what was said."""
    api.answer_with("classified")
    with structlog.testing.capture_logs() as events:
        api.http.post("/v1/chat/completions", json=api.body(stream=True), headers={"x-request-id": "mine"})
        wait_until(lambda: any(event.get("request_id") == "mine" for event in events), "the log line")
    (event,) = [event for event in events if event.get("request_id") == "mine"]
    assert (event["event"], event["status"], event["stream"]) == ("request.finished", 200, True)
    assert event["finish_reason"] == "stop"
    assert event["completion_tokens"] > 1
    assert event["ttft_ms"] >= 0
    assert "classified" not in str(events)


@pytest.mark.parametrize("name", [MODEL, "alias", "default"])
def test_the_model_answers_to_its_names(api: ApiServer, name: str):
    """And says its own."""
    api.answer_with("x")
    assert api.chat(model=name).json()["model"] == MODEL


def test_models_are_listed_and_found(api: ApiServer):
    """Ids with slashes come raw and encoded."""
    client = api.client()
    assert [model.id for model in client.models.list()] == [MODEL, "alias", "default"]
    assert client.models.retrieve(MODEL).id == MODEL
    for path in ("org/tiny-model", "org%2Ftiny-model"):
        body = api.http.get(f"/v1/models/{path}").json()
        assert (body["id"], body["object"], body["max_model_len"]) == (MODEL, "model", CONTEXT_LEN)
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody/nothing")
    assert caught.value.code == "model_not_found"


def test_health_readiness_and_mesh(api: ApiServer):
    """Ready only with a route; the mesh's figures are fresh."""
    assert api.http.get("/healthz").status_code == 200
    assert api.http.get("/readyz").status_code == 200
    api.mesh.missing = "layers 3:6 are missing"
    response = api.http.get("/readyz")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert "layers 3:6" in response.json()["error"]["message"]
    assert response.headers["retry-after"]
    assert api.http.get("/mesh").json() == {"nodes": [], "links": []}
    assert api.mesh.refreshed == 1
