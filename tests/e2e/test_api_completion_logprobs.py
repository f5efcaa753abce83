"""Log-probabilities of text completions over real HTTP, and what is made of them: the best of several, lm-eval."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.generation_request import GenerationRequest, PromptScores, Token, TokenLogprobs
from tests.support.api_server import MODEL, ApiServer, running_api
from tests.support.completion_calls import choices, complete, stream
from tests.support.scripted_scores import answers, greedy, logprobs_after, prompt_scores
from tests.support.text_tokenizers import build_byte_level, build_metaspace, build_word_piece


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One server for all tests."""
    with running_api(build_byte_level(tmp_path_factory.mktemp("model"))) as running:
        yield running


@pytest.fixture
def api(server: ApiServer) -> ApiServer:
    """The server, with nothing scripted yet."""
    server.reset()
    return server


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_the_same_in_both_modes(api: ApiServer, echo: bool, count: int):
    """Four lists of equal lengths, offsets that point into the text, every token among its alternatives."""
    api.generator.scores, api.generator.script = prompt_scores, answers
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
    api.generator.scores, api.generator.script = prompt_scores, answers
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
