"""Faults of choices, log-probabilities, reasoning and raw completions that users reported of other servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conformance.caller import Caller, calling, error_of, fault, rule

THOUGHT = "plan E"
RULES = [
    rule("numbers", "one", "two two", "three three three"),
    rule("reasons", {"text": f"<think>\n{THOUGHT}\n</think>\n\nanswer END rest", "split": "character"}),
    rule("impossible", {"text": "ab", "split": "character", "logprobs": ["-inf", -0.25]}),
    rule("emoji", {"text": "\U0001f600", "split": "byte"}),
    rule("lose a cache", "one two three four", faults=[fault("miss", 2), fault("drop_link", 3, hop="middle")]),
    rule("specials", "a<|im_start|>b"),
    {"match": {"any": True}, "answers": ["whatever"]},
]


@pytest.fixture(scope="module")
def caller() -> Iterator[Caller]:
    """One mesh for all tests of this file."""
    with calling(RULES) as running:
        yield running


def complete(caller: Caller, **parameters: Any) -> dict[str, Any]:
    """A raw completion."""
    response = caller.mesh.http.post("/v1/completions", json={"model": "scripted", **parameters})
    assert response.status_code == 200, response.text
    return dict(response.json())


# --- choices ------------------------------------------------------------------------------------


def test_tokens_of_several_choices_are_counted_wrongly(caller: Caller):
    """vllm#8625: the sum of all choices, the prompt once, in both modes."""
    alone = [caller.chat("numbers", seed=seed)["usage"] for seed in (0, 1, 2)]
    answer = caller.both("numbers", n=3, seed=50)
    assert answer.whole["usage"]["prompt_tokens"] == alone[0]["prompt_tokens"]
    assert answer.whole["usage"]["completion_tokens"] == sum(usage["completion_tokens"] for usage in alone)


def test_a_choice_does_not_finish(caller: Caller):
    """vllm#27572: each of them does, whatever the others do."""
    answer = caller.both("numbers", n=3, max_tokens=2, seed=60)
    assert all(choice.finish_reason in {"stop", "length"} for choice in answer.stream.choices.values())


def test_choices_do_not_survive_a_lost_cache(caller: Caller):
    """Each is rebuilt for itself."""
    answer = caller.both("lose a cache", n=2)
    assert [choice["message"]["content"] for choice in answer.whole["choices"]] == ["one two three four"] * 2


# --- log-probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"top_logprobs": 0}, {"top_logprobs": 3}])
def test_logprobs_without_top_logprobs_are_refused(caller: Caller, more: dict[str, int]):
    """vllm#4795: entries then have an empty list; both modes give the same entries."""
    answer = caller.both("emoji", logprobs=True, **more)
    entries = answer.whole["choices"][0]["logprobs"]["content"]
    assert entries == answer.stream.first.logprobs
    assert all(len(entry["top_logprobs"]) == more.get("top_logprobs", 0) for entry in entries)


def test_the_bytes_of_half_characters_are_lost(caller: Caller):
    """OpenAI's own contract: each token's true bytes, joined they are the text."""
    entries = caller.chat("emoji", logprobs=True)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"] or []) for entry in entries).startswith("\U0001f600".encode())


def test_an_infinite_logprob_breaks_the_json(caller: Caller):
    """VLLM clamps it: no Infinity reaches a JSON reader."""
    response = caller.post("impossible", logprobs=True, top_logprobs=2)
    assert response.status_code == 200
    assert "Infinity" not in response.text
    entries = response.json()["choices"][0]["logprobs"]["content"]
    assert entries[0]["logprob"] <= -9999
    assert entries[1]["logprob"] == pytest.approx(-0.25)


# --- reasoning ----------------------------------------------------------------------------------


def test_reasoning_is_lost_where_its_field_was_renamed(caller: Caller):
    """vllm#50624, litellm#20246: both names say the same, whole and streamed."""
    answer = caller.both("reasons")
    message = answer.whole["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"]
    assert message["reasoning"].strip() == answer.stream.first.reasoning.strip() == THOUGHT


def test_a_stop_string_splits_the_end_of_the_reasoning(caller: Caller):
    """vllm#51641, #45636: text held back as a possible stop string does not hide the marker."""
    answer = caller.both("reasons", stop=["END", "E</"])
    assert answer.text.strip() == "answer"
    assert answer.stream.first.reasoning.strip() == THOUGHT


def test_special_tokens_are_stripped_although_they_are_wanted(caller: Caller):
    """Openvino model_server#4168: skip_special_tokens decides."""
    assert caller.both("specials").text == "ab"
    assert caller.both("specials", skip_special_tokens=False).text.startswith("a<|im_start|>b")


# --- raw completions ----------------------------------------------------------------------------


def test_scoring_a_prompt_ends_the_server(caller: Caller):
    """vllm#6521: echo without new tokens returns the prompt's log-probabilities, and the next call works."""
    (choice,) = complete(caller, prompt="one two", echo=True, max_tokens=0, logprobs=1)["choices"]
    assert choice["text"] == "one two"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])
    caller.works()


def test_echo_has_no_logprobs(caller: Caller):
    """llama.cpp#27174, #8942: what lm-eval sums is there, for every prompt of a batch."""
    prompts = [[70, 71, 72, 73], [80, 81]]
    choices = complete(caller, prompt=prompts, echo=True, max_tokens=1, logprobs=1, temperature=0)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice, prompt in zip(choices, prompts, strict=True):
        scores = choice["logprobs"]
        assert len(scores["token_logprobs"]) == len(prompt) + 1
        assert all(
            value <= max(top.values())
            for value, top in zip(scores["token_logprobs"][1:], scores["top_logprobs"][1:], strict=True)
        )


def test_raw_prompts_have_the_wrong_number_of_begins():
    """vllm#5278, llama-cpp-python#1439: text gets one; one that has it, and ids, get none."""
    rules = [
        {"match": {"regex": r"^(<\|begin_of_text\|>){2}"}, "answers": ["two"]},
        {"match": {"regex": r"^<\|begin_of_text\|>"}, "answers": ["one"]},
        {"match": {"any": True}, "answers": ["none"]},
    ]
    with calling(rules, model={"bos": True}) as caller:
        assert complete(caller, prompt="hello")["choices"][0]["text"] == "one"
        assert complete(caller, prompt=[70, 71])["choices"][0]["text"] == "none"


def test_a_suffix_is_ignored(caller: Caller):
    """A model that cannot fill in says so."""
    response: httpx.Response = caller.mesh.http.post(
        "/v1/completions", json={"model": "scripted", "prompt": "a", "suffix": "b"}
    )
    assert error_of(response, 400)["param"] == "suffix"
