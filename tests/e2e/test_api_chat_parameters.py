"""Every parameter of a chat completion that works: what reaches the nodes, and what comes back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from gateway.generation_request import GenerationRequest, Token, TokenLogprobs
from gateway.state import SEED_BITS
from shared.messages import SamplingParams
from tests.support.api_server import ApiServer, running_api
from tests.support.stream_validator import validate_stream
from tests.support.text_tokenizers import build_byte_level, write_configs

TEXT = "H\u00f6r \U0001f600 zu."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A model whose authors recommend how to sample it."""
    folder = build_byte_level(tmp_path_factory.mktemp("model"))
    write_configs(folder, temperature=0.6, top_p=0.9, top_k=20, min_p=0.0, repetition_penalty=1.05)
    with running_api(folder) as running:
        yield running


@pytest.fixture
def api(server: ApiServer) -> ApiServer:
    """The server, with nothing scripted yet."""
    server.reset()
    server.answer_with(TEXT)
    return server


def sent(api: ApiServer, **parameters: Any) -> SamplingParams:
    """What the nodes are asked for the first choice."""
    response = api.chat(**parameters)
    assert response.status_code == 200, response.text
    return api.generator.requests[-1].choices[0]


def test_the_models_own_recommendations_are_the_defaults(api: ApiServer):
    """What a caller sends wins."""
    params = sent(api)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.9, 20, 1.05)
    params = sent(api, temperature=0, top_p=1, top_k=-1, repeat_penalty=1.0)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("parameters", "fields"),
    [
        ({"top_k": 5, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1}),
        ({"frequency_penalty": 0.5, "presence_penalty": -0.5}, {"frequency_penalty": 0.5, "presence_penalty": -0.5}),
        ({"logit_bias": {"5": -100, "6": 7}}, {"banned_ids": (5,), "logit_bias": ((6, 7.0),)}),
        ({"allowed_token_ids": [7, 8]}, {"allowed_ids": (7, 8)}),
        ({"min_tokens": 3, "stop_token_ids": [9]}, {"min_tokens": 3, "end_ids": (2, 9)}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        ({"seed": 11}, {"seed": 11}),
    ],
)
def test_sampling_parameters_reach_the_nodes(api: ApiServer, parameters: dict[str, Any], fields: dict[str, Any]):
    """Each at its place."""
    params = sent(api, **parameters)
    assert {name: getattr(params, name) for name in fields} == fields


@pytest.mark.parametrize("temperature", [0, 1])
def test_choices_differ_in_their_seeds_alone(api: ApiServer, temperature: float):
    """The first choice is drawn as it would be alone; a call that repeats them repeats all."""
    api.generator.script = lambda _request: [Token(2, choice) for choice in range(3)]
    sent(api, n=3, seed=4, temperature=temperature)
    sent(api, n=3, seed=4, temperature=temperature)
    first, second = (request.choices for request in api.generator.requests)
    assert first == second
    assert first[0].seed == 4
    assert len({choice.seed for choice in first}) == 3
    assert all(choice.seed < 2**SEED_BITS for choice in first)


@pytest.mark.parametrize(
    ("parameters", "needle"),
    [
        ({"response_format": {"type": "json_object"}}, '"type": "object"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, '"integer"'),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"guided_choice": ["ja", "nein"]}, "nein"),
        ({"grammar": 'root ::= "ja"'}, "ja"),
    ],
)
def test_formats_reach_the_nodes_as_grammars(api: ApiServer, parameters: dict[str, Any], needle: str):
    """With the ends that a satisfied grammar allows, and where the answer begins."""
    params = sent(api, **parameters)
    assert needle in params.grammar
    assert (params.end_ids, params.prompt_len) == ((2,), len(api.generator.requests[-1].prompt_ids))


def test_a_large_schema_is_checked_in_a_thread(api: ApiServer):
    """Nothing else waits, and the grammar is the same."""
    properties = {f"property_{index}_{'x' * 60}": {"type": "string"} for index in range(400)}
    asked = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object", "properties": properties}},
    }
    assert "property_399" in sent(api, response_format=asked).grammar


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("parameters", "param", "words"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "#/no"}}}},
            "response_format.json_schema.schema",
            "#/no|'/no'",
        ),
        ({"guided_regex": "["}, "guided_regex", "regex"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "constrained"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "template"),
        ({"min_tokens": 10_000}, "min_tokens", "room"),
        ({"logit_bias": {"100000": 1}}, "logit_bias", "no token id"),
    ],
)
def test_what_this_model_cannot_do_is_a_400_before_anything_is_sent(
    api: ApiServer, parameters: dict[str, Any], param: str, words: str, stream: bool
):
    """With the reason, and no generation has begun."""
    response = api.chat(stream=stream, **parameters)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert any(word in error["message"] for word in words.split("|"))
    assert not api.generator.requests


def with_logprobs(api: ApiServer, top: int) -> list[int]:
    """Script log-probabilities for a text of characters that are several tokens."""
    ids = [*api.tokenizer.encode_text(TEXT), 2]

    def script(request: GenerationRequest) -> Iterator[Token]:
        for token_id in ids:
            alternatives = tuple((other, -other / 10) for other in range(5, 5 + top))
            yield Token(token_id, logprobs=TokenLogprobs(-0.25, alternatives))

    api.generator.script = script
    return ids


@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities_spell_every_token_in_its_own_bytes(api: ApiServer, top: int):
    """Half characters and the end token too; the same whole and streamed."""
    ids = with_logprobs(api, top)
    asked = {"logprobs": True, "top_logprobs": top}
    (choice,) = api.client().chat.completions.create(**api.body(), **asked).choices
    assert choice.logprobs is not None
    entries = [entry.model_dump() for entry in choice.logprobs.content or []]
    assert len(entries) == len(ids)
    assert bytes(chain.from_iterable(entry["bytes"] for entry in entries[:-1])).decode() == TEXT
    assert entries[-1]["token"] == "<|im_end|>"
    assert all(math.isclose(entry["logprob"], -0.25) for entry in entries)
    assert all(len(entry["top_logprobs"]) == top for entry in entries)
    assert api.stream(**asked).first.logprobs == entries


def test_token_ids_come_back_where_they_are_asked_for(api: ApiServer):
    """Of prompt and answer."""
    ids = [*api.tokenizer.encode_text(TEXT), 2]
    body = api.chat(return_token_ids=True).json()
    assert body["choices"][0]["token_ids"] == ids
    assert body["prompt_token_ids"] == list(api.generator.requests[-1].prompt_ids)
    assert api.stream(return_token_ids=True).first.token_ids == ids


@pytest.mark.parametrize(
    ("parameters", "text", "reason"),
    [
        ({}, "a b", ("stop", None)),
        ({"skip_special_tokens": False}, "a<|im_start|> b", ("stop", None)),
        ({"stop": " b"}, "a", ("stop", " b")),
        ({"stop": " b", "include_stop_str_in_output": True}, "a b", ("stop", " b")),
        ({"stop_token_ids": [1]}, "a", ("stop", 1)),
        ({"ignore_eos": True}, "a b more", ("length", None)),
        ({"ignore_eos": True, "stop": "mo"}, "a b ", ("stop", "mo")),
    ],
)
def test_where_an_answer_ends_and_what_it_shows(
    api: ApiServer, parameters: dict[str, Any], text: str, reason: tuple[str, object]
):
    """Streamed and whole."""
    ids = [*api.tokenizer.encode_text("a<|im_start|> b"), 2, *api.tokenizer.encode_text(" more")]
    api.generator.script = lambda _request: ids
    choice = api.chat(**parameters, max_tokens=len(ids)).json()["choices"][0]
    assert choice["message"]["content"] == text
    assert (choice["finish_reason"], choice.get("stop_reason")) == reason
    stream = api.stream(**parameters, max_tokens=len(ids)).first
    assert (stream.text, stream.finish_reason, stream.stop_reason) == (text, *reason)


def test_usage_so_far_comes_with_every_chunk(api: ApiServer):
    """As benchmark clients ask for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = api.chat(stream=True, stream_options=options)
    stream = validate_stream(response.content, include_usage=True, continuous_usage=True)
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream.chunks]
    assert counts == sorted(counts)
    assert stream.usage is not None
    assert counts[-1] == stream.usage["completion_tokens"]


def test_the_tier_is_echoed_and_the_priority_passed_on(api: ApiServer):
    """There is one tier; the queue knows the priority."""
    assert api.chat(service_tier="flex", priority=-5).json()["service_tier"] == "default"
    assert api.generator.requests[-1].priority == -5
    assert "service_tier" not in api.chat().json()


def test_a_message_left_open_is_continued(api: ApiServer):
    """The prompt ends with it."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once upon"}]
    sent(api, messages=messages, continue_final_message=True)
    prompt = api.generator.requests[-1].prompt_ids
    assert prompt == api.tokenizer.encode_text("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nOnce upon")


def test_null_everywhere_is_as_good_as_absent(api: ApiServer):
    """Some clients send every field they know."""
    names = (
        "temperature",
        "tools",
        "tool_choice",
        "response_format",
        "logprobs",
        "n",
        "stop",
        "functions",
        "logit_bias",
    )
    plain, nulls = api.chat(seed=1).json(), api.chat(seed=1, **dict.fromkeys(names)).json()
    assert json.dumps(plain["choices"]) == json.dumps(nulls["choices"])
    first, second = api.generator.requests
    assert first.choices == second.choices
