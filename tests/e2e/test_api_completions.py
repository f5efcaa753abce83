"""Text completions over real HTTP, with the real SDK, from a scripted generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.generation_request import GenerationRequest, PromptScores, Token, TokenLogprobs
from shared.errors import MeshError
from tests.support.api_server import MODEL, ApiServer, running_api
from tests.support.completion_validator import ValidTextStream, validate_text_stream
from tests.support.fleet import wait_until
from tests.support.scripted_generator import FOR_EVER
from tests.support.scripted_scores import greedy, logprobs_after, prompt_scores
from tests.support.text_tokenizers import CONTEXT_LEN, build_byte_level, build_metaspace, build_word_piece

TEXT = "Hell\u00f6 \u4f60\u597d, \U0001f600\u2028 the mesh.\n"
NOTICED_S = 1.0
INVALID = "invalid_value"


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


def complete(api: ApiServer, **body: Any) -> httpx.Response:
    """POST."""
    return api.http.post("/v1/completions", json={"model": MODEL, **body})


def choices(api: ApiServer, **body: Any) -> list[dict[str, Any]]:
    """Of a call that is not streamed, in their order."""
    response = complete(api, **body)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    assert [choice["index"] for choice in found] == list(range(len(found)))
    return found


def stream(api: ApiServer, **body: Any) -> ValidTextStream:
    """A streamed call, validated."""
    response = complete(api, stream=True, **body)
    assert response.status_code == 200, response.text
    options = body.get("stream_options") or {}
    return validate_text_stream(
        response.content,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
    )


def scripted_model(request: GenerationRequest) -> list[Token]:
    """Each choice is what the little model of `scripted_scores` says, with log-probabilities if asked for."""
    answer = greedy(request.prompt_ids, request.max_tokens)
    tokens = []
    for position, token_id in enumerate(answer):
        previous = [*request.prompt_ids, *answer][len(request.prompt_ids) + position - 1]
        for choice, sampling in enumerate(request.choices):
            top = sampling.logprobs
            logprobs = None if top is None else logprobs_after(previous, token_id, top)
            tokens.append(Token(token_id, choice, logprobs))
    return tokens


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


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_the_same_in_both_modes(api: ApiServer, echo: bool, count: int):
    """Four lists of equal lengths, offsets that point into the text, every token among its alternatives."""
    api.generator.scores, api.generator.script = prompt_scores, scripted_model
    body = {"prompt": ["The \u4f60 mesh", "b"], "n": 2, "max_tokens": 8, "logprobs": count, "echo": echo}
    whole = choices(api, **body)
    streamed = stream(api, **body)
    for choice in whole:
        logprobs = choice["logprobs"]
        assert streamed.choices[choice["index"]].logprobs == logprobs
        prompt_tokens = len(api.generator.requests[choice["index"] // 2].prompt_ids) if echo else 0
        assert {len(values) for values in logprobs.values()} == {prompt_tokens + 8}
        for token, value, top, offset in zip(*logprobs.values(), strict=True):
            if value is None:
                assert echo
                assert (top, offset) == (None, 0)
                continue
            assert top[token] == value
            assert count <= len(top) <= count + 1
            assert token.startswith("bytes:") or choice["text"].startswith(token, offset)
    assert whole[0]["logprobs"] == whole[1]["logprobs"]


def test_half_a_character_is_spelled_by_its_bytes(api: ApiServer):
    """And begins where the character does."""
    ids = api.tokenizer.encode_text("\U0001f680")
    assert len(ids) > 1
    api.generator.script = lambda _request: [Token(token_id, 0, TokenLogprobs(-1.0)) for token_id in ids]
    (choice,) = choices(api, prompt="a", logprobs=0, max_tokens=len(ids))
    assert choice["text"] == "\U0001f680"
    spelled = [token.removeprefix("bytes:").replace("\\x", "") for token in choice["logprobs"]["tokens"]]
    assert b"".join(map(bytes.fromhex, spelled)).decode() == "\U0001f680"
    assert set(choice["logprobs"]["text_offset"]) == {0}


def test_the_best_of_several(api: ApiServer):
    """The likeliest per token first; all that was generated is counted; no log-probabilities unless asked for."""
    a, b, c, end = (*(api.tokenizer.encode_text(letter)[0] for letter in "abc"), min(api.tokenizer.eos_ids))

    def script(request: GenerationRequest) -> list[Token]:
        means = {0: -3.0, 1: -1.0, 2: -2.0}
        assert all(params.logprobs == 0 for params in request.choices)
        return [
            token
            for choice, token_id in enumerate((a, b, c))
            for token in (
                Token(token_id, choice, TokenLogprobs(means[choice])),
                Token(end, choice, TokenLogprobs(means[choice])),
            )
        ]

    api.generator.script = script
    response = complete(api, prompt=["x", "y"], n=2, best_of=3).json()
    assert [choice["text"] for choice in response["choices"]] == ["b", "c", "b", "c"]
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in response["choices"])
    assert response["usage"]["completion_tokens"] == 12


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
        ({"prompt": [[5] * 250] * 256, "n": 4, "echo": True, "logprobs": 20, "max_tokens": 0}, "logprobs", INVALID),
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


@pytest.mark.parametrize("build", [build_byte_level, build_metaspace, build_word_piece])
def test_random_tokens_give_the_same_in_both_modes(tmp_path: Path, build: Callable[[Path], Path]):
    """Invalid UTF-8, special tokens, stop strings across borders: text, log-probabilities, ids and reasons agree."""
    rng = random.Random(11)
    with running_api(build(tmp_path)) as api:
        for _ in range(15):
            ids = [[rng.randrange(api.tokenizer.ids_end) for _ in range(30)] for _ in range(2)]
            tokens = [
                Token(token_id, choice, TokenLogprobs(-rng.random(), ((rng.randrange(5), -0.5),)))
                for pair in zip(*ids, strict=True)
                for choice, token_id in enumerate(pair)
            ]
            api.generator.script = lambda _request, tokens=tokens: tokens
            api.generator.scores = lambda request: PromptScores([None, *[TokenLogprobs(-1.0)] * 4])
            prompt = [rng.randrange(api.tokenizer.ids_end) for _ in range(5)]
            stop = rng.sample(["e", "th", "a\n", " ", "mesh", "\ufffd"], 2)
            body = {"prompt": prompt, "n": 2, "max_tokens": 30, "logprobs": 1, "echo": True, "stop": stop}
            whole = choices(api, **body, return_token_ids=True)
            streamed = stream(api, **body, return_token_ids=True)
            for choice in whole:
                found = streamed.choices[choice["index"]]
                assert (found.text, found.finish_reason) == (choice["text"], choice["finish_reason"])
                assert (found.logprobs, found.token_ids) == (choice["logprobs"], choice["token_ids"])


class LmEval:
    """What lm-evaluation-harness's `local-completions` does for a loglikelihood task, over any token ids.

    Requests as its `LocalCompletionsAPI._create_payload` builds them, answers read as its `parse_logprobs` does.
    """

    def __init__(self, post: Callable[[dict[str, Any]], httpx.Response]) -> None:
        self._post = post

    def loglikelihood(self, batch: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Of each continuation after its context, and whether greedy decoding would have written it."""
        payload = {
            "model": MODEL,
            "prompt": [context + continuation for context, continuation in batch],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        response = self._post(payload)
        response.raise_for_status()
        answer = []
        ordered = sorted(response.json()["choices"], key=lambda choice: choice["index"])
        for choice, (context, _) in zip(ordered, batch, strict=True):
            values = choice["logprobs"]["token_logprobs"][len(context) : -1]
            tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
            greedy_too = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
            answer.append((sum(values), greedy_too))
        return answer


def test_lm_eval_gets_the_likelihoods_of_its_continuations(api: ApiServer):
    """Exactly, for a batch whose members differ in length, some of them greedy."""
    api.generator.scores, api.generator.script = prompt_scores, scripted_model
    context = [5, 60, 61]
    batch = [
        (context, greedy(context, 4)),
        (context, [*greedy(context, 3), 9]),
        ([7], [8]),
        ([9, 200, 201, 202, 203, 204], greedy([204], 1)),
        ([100] * 20, list(range(50, 80))),
    ]
    found = LmEval(lambda body: api.http.post("/v1/completions", json=body)).loglikelihood(batch)
    for (prefix, continuation), (total, is_greedy) in zip(batch, found, strict=True):
        ids = [*prefix, *continuation]
        pairs = list(pairwise(ids))[len(prefix) - 1 :]
        assert total == sum(logprobs_after(previous, token_id, 0).logprob for previous, token_id in pairs)
        assert is_greedy == (continuation == greedy(prefix, len(continuation)))
    assert [is_greedy for _, is_greedy in found] == [True, False, False, True, False]
