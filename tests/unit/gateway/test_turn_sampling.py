"""What the last hop is told, from what a caller asks and what the model recommends."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from gateway.chat_request import SamplingAsked
from gateway.openai_errors import ApiError
from gateway.sampling_schema import IDS_MAX, STOP_IDS_MAX
from gateway.turn_sampling import check_vocabulary, choice_seeds, end_ids, sampling_params, wire_seed
from shared.fields import GRAMMAR_CHARS_MAX
from shared.frame import FrameLimits
from shared.messages import SamplingParams

ROUTE_BYTES = 16 * 1024
"""Some two hundred hops."""


def params(asked: SamplingAsked, **more: Any) -> SamplingParams:
    """With a prompt of seven tokens and two ends."""
    return sampling_params(asked, **{"defaults": {}, "seed": 5, "prompt_len": 7, "end_ids": frozenset({2, 1}), **more})


def test_nothing_asked_is_the_apis_defaults_and_asks_nothing_of_a_node():
    """An old node serves it."""
    assert params(SamplingAsked()).asked_fields() == {"seed"}


def test_the_models_recommendations_stand_in_for_what_is_not_asked():
    """The caller's word wins, 0 included."""
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    recommended = params(SamplingAsked(), defaults=defaults)
    assert {name: getattr(recommended, name) for name in defaults} == defaults
    own = params(SamplingAsked(temperature=0, top_k=0, min_p=0, repetition_penalty=1.0), defaults=defaults)
    assert (own.temperature, own.top_p, own.top_k, own.min_p, own.repetition_penalty) == (0, 0.95, 0, 0, 1)


@pytest.mark.parametrize(("asked", "sent"), [(1e-6, 0.0), (1e-5, 1e-5), (2.0, 2.0)])
def test_a_temperature_that_would_overflow_is_greedy(asked: float, sent: float):
    """The limit that it tends to."""
    assert params(SamplingAsked(temperature=asked)).temperature == sent


def test_the_lowest_bias_bans_and_a_bias_of_nothing_is_none():
    """A ban is certain, whatever the logits."""
    sent = params(SamplingAsked(logit_bias=((5, -100.0), (6, 3.0), (7, 0.0))))
    assert (sent.banned_ids, sent.logit_bias) == ((5,), ((6, 3.0),))


@pytest.mark.parametrize(
    ("asked", "grammar"), [(SamplingAsked(min_tokens=3), ""), (SamplingAsked(), "g"), (SamplingAsked(min_p=0.5), "")]
)
def test_ends_and_prompt_length_are_sent_where_they_decide_something(asked: SamplingAsked, grammar: str):
    """They are in the header of the prefill otherwise for nothing."""
    sent = params(asked, grammar=grammar)
    assert (sent.end_ids, sent.prompt_len) == (((1, 2), 7) if asked.min_tokens or grammar else ((), 0))


def test_penalties_know_where_the_answer_begins():
    """Frequency and presence count the answer alone."""
    sent = params(SamplingAsked(frequency_penalty=0.5, presence_penalty=-1))
    assert (sent.frequency_penalty, sent.presence_penalty, sent.prompt_len, sent.end_ids) == (0.5, -1, 7, ())


def test_ends_are_the_models_and_the_callers():
    """Unless the model's are ignored."""
    asked = {"stop_token_ids": (9,)}
    assert end_ids(SamplingAsked(**asked), frozenset({2})) == {2, 9}
    assert end_ids(SamplingAsked(**asked, ignore_eos=True), frozenset({2})) == {9}


def test_each_choice_has_a_seed_of_its_own_and_the_first_the_calls():
    """The same for the same seed, and on the wire's scale."""
    seeds = choice_seeds(5, 128)
    assert seeds[0] == 5
    assert choice_seeds(5, 3) == seeds[:3]
    assert len(set(seeds)) == 128
    assert all(0 <= seed < 2**53 for seed in [*seeds, wire_seed(-1), wire_seed(2**63 - 1)])


def test_the_largest_parameters_fit_into_a_nodes_header():
    """Every list at its limit and a grammar that doubles when it is quoted, with room for a route."""
    ids = tuple(range(900_000, 900_000 + IDS_MAX))
    asked = SamplingAsked(
        logit_bias=tuple((token_id, -math.pi * 31) for token_id in ids),
        allowed_token_ids=ids,
        stop_token_ids=ids[:STOP_IDS_MAX],
    )
    ends = end_ids(asked, frozenset(range(20)))
    header = params(asked, grammar="\\" * GRAMMAR_CHARS_MAX, end_ids=ends).to_header()
    assert len(json.dumps(header, separators=(",", ":"))) < FrameLimits().header_bytes_max - ROUTE_BYTES


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (SamplingAsked(logit_bias=((400, 1.0),)), "logit_bias"),
        (SamplingAsked(allowed_token_ids=(399, 400)), "allowed_token_ids"),
        (SamplingAsked(stop_token_ids=(10**6,)), "stop_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_parameter(asked: SamplingAsked, param: str):
    """A node could not honour them."""
    with pytest.raises(ApiError, match="399") as caught:
        check_vocabulary(asked, 400)
    assert caught.value.param == param
    check_vocabulary(SamplingAsked(logit_bias=((399, 1.0),)), 400)


@pytest.mark.parametrize(
    "asked",
    [
        SamplingAsked(allowed_token_ids=(5,), logit_bias=((5, -100.0),)),
        SamplingAsked(allowed_token_ids=(2,), min_tokens=3),
        SamplingAsked(allowed_token_ids=(5,), stop_token_ids=(5,), min_tokens=3),
    ],
)
def test_what_leaves_no_token_at_all_is_refused_before(asked: SamplingAsked) -> None:
    """Parameters that exclude each other are the caller's to mend."""
    with pytest.raises(ApiError, match="allowed_token_ids") as caught:
        sampling_params(asked, defaults={}, seed=1, prompt_len=3, end_ids=end_ids(asked, frozenset({2})))
    assert caught.value.status == 400
