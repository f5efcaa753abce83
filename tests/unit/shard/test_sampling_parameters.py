"""Each sampling parameter by value, its edges included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shard.sampling import Before, sample
from shard.step_check import check_ranges, check_sampling
from shared.errors import StepFailed
from shared.messages import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])
VOCAB_SIZE = len(LOGITS)


def greedy(
    params: dict[str, object],
    history: list[int] | None = None,
    mask: list[bool] | None = None,
    logits: torch.Tensor = LOGITS,
) -> int:
    """The greedy token under these parameters."""
    before = Before(np.array(history or [], np.int32), None if mask is None else np.array(mask))
    return sample(logits, SamplingParams(temperature=0.0, **params), 9, before)  # type: ignore[arg-type]


def drawable(params: dict[str, object], history: list[int] | None = None, logits: torch.Tensor = LOGITS) -> set[int]:
    """What is drawn over many positions at a temperature at which everything that may come does."""
    sampling = SamplingParams(temperature=3.0, seed=1, **params)  # type: ignore[arg-type]
    before = Before(np.array(history or [], np.int32))
    return {sample(logits, sampling, position, before) for position in range(300)}


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"allowed_ids": (3,)}, {3}),
        ({"allowed_ids": (4, 1, 4)}, {1, 4}),
        ({"banned_ids": (0, 2)}, {1, 3, 4}),
        ({"allowed_ids": (0, 1), "banned_ids": (0,)}, {1}),
        ({"end_ids": (0,)}, {0, 1, 2, 3, 4}),
        ({"end_ids": (0, 1), "min_tokens": 1}, {2, 3, 4}),
        ({"top_k": 0}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 5}, {0, 1, 2, 3, 4}),
        ({"top_k": 10**12}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.0}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.7}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.5, "top_k": 4, "banned_ids": (0,)}, {1, 2, 3}),
        ({"top_k": 2, "top_p": 1.0}, {0, 1}),
        ({"top_k": 2, "top_p": 0.5}, {0}),
        ({"logit_bias": ((4, 100.0),)}, {4}),
        ({"logit_bias": ((0, -100.0), (1, -100.0))}, {2, 3, 4}),
    ],
)
def test_what_may_be_drawn(params: dict[str, object], allowed: set[int]) -> None:
    """Exactly these tokens come."""
    assert drawable(params) == allowed


def test_top_p_counts_what_top_k_has_left() -> None:
    """The nucleus is of the tokens that are left: half of two equals is one of them."""
    logits = torch.zeros(102)
    logits[[40, 60]] = 1.0
    assert drawable({"top_k": 2, "top_p": 0.5}, logits=logits) == {40}
    assert drawable({"top_k": 2, "top_p": 0.51}, logits=logits) == {40, 60}


def test_of_equals_the_lowest_ids_are_the_top() -> None:
    """A cut among equal tokens keeps the lowest ids."""
    logits = torch.full((50,), 1.0)
    assert drawable({"top_k": 3}, logits=logits) == {0, 1, 2}


def test_end_tokens_may_come_once_the_answer_is_long_enough() -> None:
    """The prompt does not count."""
    params = {"end_ids": (0,), "min_tokens": 2, "prompt_len": 3}
    assert 0 not in drawable(params, [1, 1, 1])
    assert 0 not in drawable(params, [1, 1, 1, 2])
    assert 0 in drawable(params, [1, 1, 1, 2, 2])


def test_minimum_without_end_tokens_rules_nothing_out() -> None:
    """There is nothing that would end the answer."""
    assert greedy({"min_tokens": 5}) == 0


@pytest.mark.parametrize(
    ("params", "history", "expected"),
    [
        ({"repetition_penalty": 1.9}, [0], 0),  # 2 / 1.9 is above 1
        ({"repetition_penalty": 2.1}, [0], 1),
        ({"repetition_penalty": 2.1}, [0, 0, 0, 0, 0], 1),  # once, however often
        ({"repetition_penalty": 2.1}, [0, 1], 0),  # 2 / 2.1 against 1 / 2.1, and 0.5
        ({"repetition_penalty": 5.0}, [0, 1], 2),
        ({"repetition_penalty": 2.1, "prompt_len": 1}, [0], 1),  # of the prompt too
        ({"frequency_penalty": 0.6}, [0], 0),
        ({"frequency_penalty": 0.6}, [0, 0], 1),
        ({"frequency_penalty": 0.6, "prompt_len": 1}, [0, 0], 0),  # of the answer alone
        ({"frequency_penalty": 0.6, "prompt_len": 9}, [0, 0], 0),
        ({"frequency_penalty": -2.0}, [2], 2),
        ({"presence_penalty": 0.9}, [0, 0, 0], 0),  # once
        ({"presence_penalty": 1.1}, [0], 1),
        ({"presence_penalty": 1.1, "prompt_len": 1}, [0], 0),
        ({"presence_penalty": -1.6}, [2], 2),
        ({"presence_penalty": 0.6, "frequency_penalty": 0.6}, [0], 1),
        ({"logit_bias": ((1, 1.1),)}, [], 1),
        ({"logit_bias": ((1, 0.6), (1, 0.6))}, [], 1),  # both count
        ({"logit_bias": ((3, 3.5),), "repetition_penalty": 2.0}, [3], 0),  # bias first: 2.5 / 2
        ({"logit_bias": ((3, 3.5),), "banned_ids": (3,)}, [], 0),  # no bias brings a banned token back
    ],
)
def test_shifts_move_the_highest_logit(params: dict[str, object], history: list[int], expected: int) -> None:
    """Of logits 2, 1, 0.5, -1 and -3, this one is the highest then."""
    assert greedy(params, history) == expected


def test_repetition_penalty_multiplies_negative_logits() -> None:
    """A token that is unlikely already becomes less likely, not more."""
    logits = torch.tensor([-1.0, -1.5])
    assert greedy({"repetition_penalty": 1.4}, [0], logits=logits) == 0
    assert greedy({"repetition_penalty": 1.6}, [0], logits=logits) == 1
    assert greedy({"repetition_penalty": 0.5}, [1], logits=logits) == 1


def test_grammar_mask_rules_out() -> None:
    """And goes together with the other ways to rule out."""
    mask = [False, False, True, True, False]
    assert greedy({"grammar": "g"}, mask=mask) == 2
    assert greedy({"grammar": "g", "banned_ids": (2,)}, mask=mask) == 3


def test_grammar_without_its_mask_is_our_own_bug() -> None:
    """Never a silent unconstrained draw."""
    with pytest.raises(ValueError, match="mask"):
        greedy({"grammar": "g"})


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_ids": (1,), "banned_ids": (1,)},
        {"banned_ids": (0, 1, 2, 3, 4)},
        {"allowed_ids": (4,), "end_ids": (4,), "min_tokens": 1},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_is_a_typed_failure(params: dict[str, object], temperature: float) -> None:
    """Neither a wrong token nor a crash."""
    with pytest.raises(StepFailed) as caught:
        sample(LOGITS, SamplingParams(temperature=temperature, **params), 3)  # type: ignore[arg-type]
    assert caught.value.code == "no_token_allowed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_models_logits_are_not_changed(dtype: torch.dtype, temperature: float) -> None:
    """They are needed again, for log-probabilities."""
    logits = LOGITS.to(dtype)
    params = SamplingParams(temperature=temperature, banned_ids=(0,), repetition_penalty=2.0, logit_bias=((1, 5.0),))
    sample(logits, params, 0, Before(np.array([2], np.int32)))
    assert torch.equal(logits, LOGITS.to(dtype))


def test_a_cut_by_top_k_draws_like_a_ban_of_all_others() -> None:
    """The same number chooses among the same weights, however they were found."""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(3))
    top = tuple(logits.topk(40).indices.tolist())
    for position in range(200):
        by_k = sample(logits, SamplingParams(seed=5, top_k=40, top_p=0.9), position)
        assert by_k == sample(logits, SamplingParams(seed=5, allowed_ids=top, top_p=0.9), position)


@pytest.mark.parametrize("name", ["allowed_ids", "banned_ids", "end_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_named(name: str) -> None:
    """By field, with the limit; the last id of the vocabulary is fine."""

    def params(token: int) -> SamplingParams:
        ids: object = ((token, 1.0),) if name == "logit_bias" else (0, token)
        return SamplingParams(**{name: ids})  # type: ignore[arg-type]

    check_sampling(params(VOCAB_SIZE - 1), VOCAB_SIZE)
    with pytest.raises(StepFailed, match=rf"sampling\.{name} must be ids from 0 to 4, got 5"):
        check_sampling(params(VOCAB_SIZE), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(temperature=math.nan), "temperature"),
        (SamplingParams(min_p=-0.1), "min_p"),
        (SamplingParams(min_p=1.1), "min_p"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(repetition_penalty=-1.0), "repetition_penalty"),
    ],
)
def test_ranges_are_checked(params: SamplingParams, name: str) -> None:
    """What the arithmetic relies on."""
    with pytest.raises(StepFailed, match=rf"sampling\.{name} must be"):
        check_ranges(params)


def test_a_session_is_drawn_alike_on_many_threads() -> None:
    """Everything on, one thread or two: the same tokens."""
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(4))
    params = SamplingParams(
        seed=2, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.3, logit_bias=((7, 1.0),)
    )
    before = Before(np.arange(0, 9000, 3, dtype=np.int32))
    threads = torch.get_num_threads()
    one = [sample(logits, params, position, before) for position in range(10)]
    try:
        torch.set_num_threads(2)
        assert [sample(logits, params, position, before) for position in range(10)] == one
    finally:
        torch.set_num_threads(threads)
