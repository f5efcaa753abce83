"""What a completion's choices are drawn with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.chat_request import SamplingAsked
from gateway.completions.sampling import choice_params, for_prompt
from gateway.openai_errors import ApiError
from gateway.state import GatewayState, ServedModel
from gateway.tokenizer import ChatTokenizer
from gateway.turn_sampling import choice_seeds, end_ids
from tests.support.scripted_generator import ScriptedGenerator, ScriptedMesh

IM_END = 2


@pytest.fixture(scope="module")
def gateway(text_tokenizer: Callable[[str], ChatTokenizer]) -> GatewayState:
    """A served model."""
    return GatewayState(
        model=ServedModel(names=("m",), fingerprint="f", created=0),
        tokenizer=text_tokenizer("byte_level"),
        generator=ScriptedGenerator(),
        mesh=ScriptedMesh(),
        random_seed=lambda: 7,
    )


def params_of(gateway: GatewayState, **asked: Any) -> Any:
    """Of the only choice."""
    (params,) = choice_params(SamplingAsked(**asked), gateway, choices=1, logprobs=None)
    return params


def test_a_plain_call_asks_nothing_special_of_a_node(gateway: GatewayState):
    """So a node of an older version can serve it."""
    assert params_of(gateway).asked_fields() == {"seed"}
    assert for_prompt(params_of(gateway), 9).prompt_len == 0


@pytest.mark.parametrize(
    ("asked", "field", "value"),
    [
        ({"temperature": 0.0}, "temperature", 0.0),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_k": 5}, "top_k", 5),
        ({"min_p": 0.25}, "min_p", 0.25),
        ({"frequency_penalty": -1.0}, "frequency_penalty", -1.0),
        ({"presence_penalty": 1.0}, "presence_penalty", 1.0),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"logit_bias": ((5, -99.0),)}, "logit_bias", ((5, -99.0),)),
        ({"logit_bias": ((5, -100.0),)}, "banned_ids", (5,)),
        ({"allowed_token_ids": (5, 6)}, "allowed_ids", (5, 6)),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"min_tokens": 3}, "end_ids", (IM_END,)),
        ({"min_tokens": 3, "stop_token_ids": (9,)}, "end_ids", (IM_END, 9)),
        ({"seed": 5}, "seed", 5),
    ],
)
def test_each_parameter_reaches_the_sampler(gateway: GatewayState, asked: dict[str, Any], field: str, value: object):
    """None is accepted and ignored."""
    assert getattr(params_of(gateway, **asked), field) == value


def test_choices_differ_in_their_seeds_alone(gateway: GatewayState):
    """The first has the caller's own."""
    params = choice_params(SamplingAsked(seed=2**63 - 1), gateway, choices=3, logprobs=2)
    assert len({one.seed for one in params}) == 3
    assert [one.seed for one in choice_params(SamplingAsked(seed=5), gateway, choices=2, logprobs=2)] == choice_seeds(
        5, 2
    )
    assert {one.logprobs for one in params} == {2}


@pytest.mark.parametrize("asked", [{"frequency_penalty": 1.0}, {"presence_penalty": 1.0}, {"min_tokens": 1}])
def test_the_sampler_is_told_where_the_answer_begins_where_it_counts(gateway: GatewayState, asked: dict[str, Any]):
    """The prompt's tokens are not punished."""
    assert for_prompt(params_of(gateway, **asked), 9).prompt_len == 9


def test_which_tokens_end_an_answer(gateway: GatewayState):
    """The model's own, the caller's, or only those."""
    tokenizer = gateway.tokenizer
    assert end_ids(SamplingAsked(), tokenizer.eos_ids) == {IM_END}
    assert end_ids(SamplingAsked(stop_token_ids=(9,)), tokenizer.eos_ids) == {IM_END, 9}
    assert end_ids(SamplingAsked(stop_token_ids=(9,), ignore_eos=True), tokenizer.eos_ids) == {9}


@pytest.mark.parametrize(
    "asked", [{"logit_bias": ((99999, 1.0),)}, {"allowed_token_ids": (99999,)}, {"stop_token_ids": (99999,)}]
)
def test_an_id_that_is_no_token_is_named(gateway: GatewayState, asked: dict[str, Any]):
    """Before a node sees it."""
    with pytest.raises(ApiError, match="99999") as caught:
        params_of(gateway, **asked)
    assert caught.value.param == next(iter(asked))
