"""Sampling and answer parameters: what arrives, and what is refused by which name."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.openai_errors import ApiError
from gateway.sampling_schema import IDS_MAX, STOP_IDS_MAX, read_answer, read_chat_logprobs, read_sampling, read_stop


def refused_param(**body: Any) -> str | None:
    """The `param` of the refusal."""

    def read() -> None:
        read_sampling(body)
        read_answer(body, logprobs=read_chat_logprobs(body))

    with pytest.raises(ApiError) as caught:
        read()
    assert caught.value.status == 400
    return caught.value.param


def test_every_sampling_parameter_arrives():
    """Each under its own name."""
    sampling = read_sampling(
        {
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 40,
            "min_p": 0.05,
            "seed": 7,
            "frequency_penalty": -2,
            "presence_penalty": 2,
            "repetition_penalty": 1.1,
            "logit_bias": {"5": -100, "6": 1.5},
            "allowed_token_ids": [3, 4, 3],
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [9],
        }
    )
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 40, 0.05)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (-2.0, 2.0, 1.1)
    assert (sampling.logit_bias, sampling.allowed_token_ids) == (((5, -100.0), (6, 1.5)), (3, 4))
    assert (sampling.seed, sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (7, 2, True, (9,))


def test_every_answer_parameter_arrives():
    """Number, ends, and what is shown."""
    answer = read_answer(
        {
            "n": 3,
            "stop": ["x"],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
        },
        logprobs=5,
    )
    assert (answer.n, answer.stop, answer.include_stop, answer.logprobs) == (3, ("x",), True, 5)
    assert (answer.skip_special_tokens, answer.token_ids) == (False, True)


@pytest.mark.parametrize(("given", "read"), [(-1, 0), (0, 0), (5, 5), (None, None)])
def test_no_limit_to_candidates_is_spelled_in_two_ways(given: int | None, read: int | None):
    """llama.cpp's and vLLM's."""
    assert read_sampling({"top_k": given}).top_k == read


def test_the_older_name_of_a_penalty_counts_where_the_newer_is_absent():
    """`repetition_penalty` wins."""
    assert read_sampling({"repeat_penalty": 1.2}).repetition_penalty == 1.2
    assert read_sampling({"repeat_penalty": 1.2, "repetition_penalty": 1.1}).repetition_penalty == 1.1


@pytest.mark.parametrize(
    ("body", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ],
)
def test_log_probabilities_come_with_or_without_alternatives(body: dict[str, Any], logprobs: int | None):
    """`logprobs` alone is valid."""
    assert read_chat_logprobs(body) == logprobs


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
        ({"logit_bias": {"1" * 30: 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
        ({"logit_bias": {"5": None}}, "logit_bias.5"),
        ({"logit_bias": {str(index): 1 for index in range(IDS_MAX + 1)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": list(range(IDS_MAX + 1))}, "allowed_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"stop_token_ids": list(range(STOP_IDS_MAX + 1))}, "stop_token_ids"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"n": 129}, "n"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_path(body: dict[str, Any], param: str):
    """Wrong types, ids that are none, and lists over their limit."""
    assert refused_param(**body) == param


def test_another_endpoint_names_its_limit_its_own_way():
    """The first name that is given counts, and a limit may be allowed to be 0."""
    answer = read_answer({"max_output_tokens": 0}, limit_names=("max_output_tokens",), limit_min=0)
    assert (answer.max_tokens, answer.max_tokens_param) == (0, "max_output_tokens")
    with pytest.raises(ApiError) as caught:
        read_stop([""], "stop_sequences")
    assert caught.value.param == "stop_sequences"
