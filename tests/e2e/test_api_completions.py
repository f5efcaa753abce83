"""Text completions over real HTTP, with the real SDK, from a scripted generator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.generation_request import Token
from shared.errors import MeshError
from tests.support.api_server import MODEL, ApiServer, running_api
from tests.support.completion_calls import choices, complete, stream
from tests.support.completion_validator import validate_text_stream
from tests.support.fleet import wait_until
from tests.support.scripted_generator import FOR_EVER
from tests.support.scripted_scores import prompt_scores
from tests.support.text_tokenizers import CONTEXT_LEN, build_byte_level

TEXT = "Hell\u00f6 \u4f60\u597d, \U0001f600\u2028 the mesh.\n"
NOTICED_S = 1.0


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
def api(server: ApiServer) -> Iterator[ApiServer]:
    """The server, which answers normally afterwards."""
    server.reset()
    yield server
    server.generator.admission = []
    server.answer_with("fine")
    assert complete(server, prompt="a").json()["choices"][0]["text"] == "fine"


def test_a_plain_completion_as_the_sdk_reads_it(api: ApiServer):
    """Strictly validated; the prompt as it stands, with no template around it."""
    ids = api.answer_with(TEXT)
    completion = api.client().completions.create(model=MODEL, prompt="The mesh", max_tokens=100)
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT, "stop", None)
    assert (completion.object, completion.model) == ("text_completion", MODEL)
    assert completion.id.startswith("cmpl-")
    assert completion.usage is not None
    prompt_ids = api.tokenizer.encode_text("The mesh")
    assert api.generator.requests[0].prompt_ids == prompt_ids
    assert completion.usage.prompt_tokens == len(prompt_ids)
    assert completion.usage.completion_tokens == len(ids)


def test_a_stream_as_the_sdk_reads_it(api: ApiServer):
    """The same text; the SDK's own types do not know of the null before the end, so not strictly."""
    api.answer_with(TEXT)
    client = api.client(_strict_response_validation=False)
    chunks = client.completions.create(model=MODEL, prompt="a", max_tokens=100, stream=True)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == TEXT


@pytest.mark.parametrize(
    "options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
def test_a_stream_has_text_end_and_usage(api: ApiServer, options: dict[str, Any]):
    """In the order and shape that clients depend on."""
    ids = api.answer_with(TEXT)
    found = stream(api, prompt="a", max_tokens=100, stream_options=options)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (TEXT, "stop")
    if options:
        assert found.usage is not None
        assert found.usage["completion_tokens"] == len(ids)


def test_sixteen_tokens_where_nobody_says_how_many(api: ApiServer):
    """OpenAI's default, null or absent."""
    api.generator.script = lambda _request: [70] * 100
    for body in ({}, {"max_tokens": None}):
        response = complete(api, prompt="a", **body).json()
        assert response["usage"]["completion_tokens"] == 16
        assert response["choices"][0]["finish_reason"] == "length"


def test_stop_strings_and_their_reason(api: ApiServer):
    """Found across token borders; the generation ends."""
    ids = api.tokenizer.encode_text("one STOP two")
    api.generator.script = lambda _request: [*ids, *[70] * 1000]
    body = {"prompt": "a", "max_tokens": 200, "stop": ["STOP"]}
    (choice,) = choices(api, **body)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "STOP")
    streamed = stream(api, **body).choices[0]
    assert (streamed.text, streamed.finish_reason, streamed.stop_reason) == ("one ", "stop", "STOP")
    assert api.generator.streams[0].finished == [0]


@pytest.mark.parametrize("streams", [False, True])
def test_all_forms_of_a_prompt(api: ApiServer, streams: bool):
    """A text, several, ids, several lists of them, and both: choice i answers prompt i."""
    api.generator.script = lambda request: [request.prompt_ids[-1]]
    first, second = api.tokenizer.encode_text("b"), api.tokenizer.encode_text("c")
    forms: list[tuple[Any, list[str]]] = [
        ("b", ["b"]),
        (["b", "c"], ["b", "c"]),
        (list(first), ["b"]),
        ([list(first), list(second)], ["b", "c"]),
        (["b", list(second)], ["b", "c"]),
    ]
    for prompt, texts in forms:
        if streams:
            found = stream(api, prompt=prompt, max_tokens=1)
            assert [found.choices[index].text for index in range(len(texts))] == texts
        else:
            assert [choice["text"] for choice in choices(api, prompt=prompt, max_tokens=1)] == texts


def test_spelled_control_tokens_are_control_tokens(api: ApiServer):
    """A raw prompt is its caller's own affair, unlike a chat's messages."""
    complete(api, prompt="<|im_start|>user\nhi<|im_end|>")
    assert api.generator.requests[0].prompt_ids[0] == 1


@pytest.mark.parametrize("streams", [False, True])
def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(api: ApiServer, streams: bool):
    """Index i * n + j; usage counts each prompt once and every token."""
    b, c, d, e = (api.tokenizer.encode_text(letter)[0] for letter in "bcde")
    api.generator.script = lambda request: [
        Token(token_id, choice) for choice, token_id in enumerate((b, c) if request.prompt_ids == (b,) else (d, e))
    ]
    body = {"prompt": [[b], [c]], "n": 2, "max_tokens": 1}
    if streams:
        found = stream(api, **body, stream_options={"include_usage": True})
        assert [found.choices[index].text for index in range(4)] == ["b", "c", "d", "e"]
        usage = found.usage
    else:
        response = complete(api, **body).json()
        assert [choice["text"] for choice in response["choices"]] == ["b", "c", "d", "e"]
        usage = response["usage"]
    assert usage is not None
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 4, 6)
    seeds = [params.seed for params in api.generator.requests[0].choices]
    assert len(set(seeds)) == 2, "choices of a prompt are drawn differently"


def test_an_echo_begins_with_the_decoded_prompt(api: ApiServer):
    """Streamed too; prompts given as ids are decoded."""
    api.answer_with("!")
    prompt = "The \u4f60 mesh"
    ids = list(api.tokenizer.encode_text(prompt))
    for given in (prompt, ids):
        assert choices(api, prompt=given, echo=True)[0]["text"] == prompt + "!"
        assert stream(api, prompt=given, echo=True).choices[0].text == prompt + "!"


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("streams", [False, True])
def test_an_echo_of_nothing_but_the_prompt(api: ApiServer, streams: bool, logprobs: int | None):
    """`max_tokens: 0`: no token is generated; without log-probabilities the mesh is not even asked."""
    api.generator.scores = prompt_scores
    body = {"prompt": ["The mesh", "a"], "echo": True, "max_tokens": 0, "logprobs": logprobs}
    if streams:
        found = stream(api, **body)
        texts = [found.choices[index].text for index in (0, 1)]
        reasons = {choice.finish_reason for choice in found.choices.values()}
        tokens = found.choices[0].logprobs["tokens"]
    else:
        answer = choices(api, **body)
        texts, reasons = [choice["text"] for choice in answer], {choice["finish_reason"] for choice in answer}
        tokens = (answer[0]["logprobs"] or {"tokens": []})["tokens"]
    assert (texts, reasons) == (["The mesh", "a"], {"length"})
    assert "".join(tokens) == ("" if logprobs is None else "The mesh")
    assert len(api.generator.requests) == (0 if logprobs is None else 2)


def test_no_tokens_and_no_echo_is_an_empty_text(api: ApiServer):
    """Allowed by OpenAI, and free."""
    (choice,) = choices(api, prompt="a", max_tokens=0)
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert not api.generator.requests


def test_token_ids_on_request(api: ApiServer):
    """The prompt's and the answer's, in both modes."""
    ids = api.answer_with("The mesh")
    (choice,) = choices(api, prompt=[5, 6], return_token_ids=True)
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], ids)
    streamed = stream(api, prompt=[5, 6], return_token_ids=True).choices[0]
    assert (streamed.prompt_token_ids, streamed.token_ids) == ([5, 6], ids)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "prompt", "missing_required_parameter"),
        ({"prompt": []}, "prompt", "empty_array"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": 5}, "prompt", "invalid_type"),
        ({"prompt": ["a", 5]}, "prompt[1]", "invalid_type"),
        ({"prompt": [[5], [99999]]}, "prompt[1][0]", "invalid_value"),
        ({"prompt": ["a"] * 257}, "prompt", "invalid_value"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "invalid_type"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value"),
        ({"prompt": ["a"] * 8, "n": 128, "max_tokens": 250, "logprobs": 20}, "logprobs", "invalid_value"),
        ({"prompt": [[5] * 200] * 256, "n": 4, "echo": True, "logprobs": 20}, "logprobs", "invalid_value"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "invalid_type"),
        ({"prompt": "a", "n": 0}, "n", "invalid_value"),
        ({"prompt": "a", "n": 129}, "n", "invalid_value"),
        ({"prompt": ["a"] * 9, "n": 128}, "n", "invalid_value"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "best_of", "invalid_value"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of", "invalid_value"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens", "invalid_value"),
        ({"prompt": "a", "temperature": 2.5}, "temperature", "invalid_value"),
        ({"prompt": "a", "stop": [""]}, "stop", "invalid_value"),
        ({"prompt": "a", "echo": "yes"}, "echo", "invalid_type"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "invalid_value"),
        ({"prompt": "a", "messages": []}, "messages", "unsupported_parameter"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ],
)
def test_what_is_wrong_is_named(api: ApiServer, body: dict[str, Any], param: str, code: str):
    """A 400 in OpenAI's shape, before anything is generated."""
    response = complete(api, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert not api.generator.requests


def test_tokens_that_end_an_answer_are_the_callers_to_choose(api: ApiServer):
    """Beside the model's own, or without them."""
    end = min(api.tokenizer.eos_ids)
    api.generator.script = lambda _request: [70, end, 71, 72]
    (choice,) = choices(api, prompt="a", ignore_eos=True, stop_token_ids=[71])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 71)
    assert choice["text"] == api.tokenizer.decode([70])
    assert "stop_reason" not in choices(api, prompt="a")[0]


def test_what_asks_for_nothing_passes(api: ApiServer):
    """Clients send every field that they know."""
    api.answer_with("fine")
    neutral = {"suffix": None, "best_of": None, "logprobs": None, "stop": [], "echo": False, "n": 1, "user": "u"}
    assert choices(api, prompt="a", **neutral)[0]["text"] == "fine"
    assert choices(api, prompt="a", suffix="", logprobs=False, stop=None)[0]["text"] == "fine"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "numbers"),
    [
        ([5] * 250, 7, (CONTEXT_LEN, 250, 7, 257)),
        ([[5], [5] * 300], 1, (CONTEXT_LEN, 300, 1, 301)),
        ([5] * 257, 0, (CONTEXT_LEN, 257)),
    ],
)
def test_what_does_not_fit_is_refused_with_true_numbers(
    api: ApiServer, prompt: Any, max_tokens: int, numbers: tuple[int, ...], streams: bool
):
    """Before any byte of a stream; what just fits is served."""
    response = complete(api, prompt=prompt, max_tokens=max_tokens, stream=streams)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is" in error["message"]
    assert all(str(number) in error["message"] for number in numbers)
    assert error["param"] == ("prompt[1]" if isinstance(prompt[0], list) else "prompt")
    assert not api.generator.requests


def test_what_just_fits_is_served(api: ApiServer):
    """To the last position."""
    api.generator.script = lambda _request: [70] * 10
    assert complete(api, prompt=[5] * 250, max_tokens=6).status_code == 200


@pytest.mark.parametrize("streams", [False, True])
def test_one_prompt_that_fails_ends_the_call(api: ApiServer, streams: bool):
    """With an error of its own, or an error frame once text has been sent; the other prompts are given up."""
    failure = MeshError("node_lost", "a node is gone")
    api.generator.script = lambda request: [70, failure] if request.prompt_ids == (5,) else [FOR_EVER()]
    response = complete(api, prompt=[[5], [6]], stream=streams, max_tokens=9)
    if streams:
        error = validate_text_stream(response.content).error
        assert error is not None
    else:
        assert response.status_code == 503
        error = response.json()["error"]
    assert error["code"] == "node_lost"
    wait_until(lambda: api.generator.active == 0, "the end of the other prompt", NOTICED_S)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_ends_all_prompts(api: ApiServer, streams: bool):
    """Within a second, those that wait for their turn too."""
    api.generator.script = lambda _request: [70, FOR_EVER()]
    connection = api.connect()
    body = b'{"model":"default","prompt":["a","b","c","d","e","f"],"stream":%b}' % (b"true" if streams else b"false")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % len(body) + body)
    wait_until(lambda: api.generator.yielded == 4, "four prompts to begin")
    connection.close()
    wait_until(lambda: api.generator.active == 0, "the end of the work", NOTICED_S)
    assert set(api.generator.ends) == {"cancelled"}
    assert len(api.generator.requests) == 4
