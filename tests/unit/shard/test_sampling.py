"""Sampling is a pure function with the right distribution."""

from __future__ import annotations

import math

import pytest
import torch

from shard.sampling import sample, uniform
from shared.errors import StepFailed
from shared.messages import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))


def frequencies(params: SamplingParams, count: int, logits: torch.Tensor = LOGITS) -> list[float]:
    """How often each token is drawn over `count` positions."""
    drawn = [sample(logits, params, position) for position in range(count)]
    return [drawn.count(token) / count for token in range(len(logits))]


def test_greedy_takes_the_lowest_of_equals() -> None:
    """Ties do not depend on the kernel."""
    logits = torch.full((1000,), -1.0)
    logits[[700, 300, 999]] = 2.0
    assert sample(logits, GREEDY, 0) == 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_type_is_sampled(dtype: torch.dtype) -> None:
    """Also what the head gives in low precision."""
    assert sample(LOGITS.to(dtype), GREEDY, 3) == 0
    assert sample(LOGITS.to(dtype), SamplingParams(seed=1), 3) in range(4)


def test_the_same_seed_and_position_give_the_same_token() -> None:
    """Nothing but the arguments decides."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=42)
    first = [sample(logits, params, position) for position in range(50)]
    torch.manual_seed(5)
    assert [sample(logits.clone(), params, position) for position in range(50)] == first
    assert len(set(first)) > 10
    assert [sample(logits, SamplingParams(temperature=0.9, top_p=0.95, seed=43), p) for p in range(50)] != first


def test_draws_do_not_depend_on_threads() -> None:
    """One thread or two, the same tokens."""
    logits = torch.randn(50_000, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(seed=9)
    before = torch.get_num_threads()
    one = [sample(logits, params, position) for position in range(20)]
    try:
        torch.set_num_threads(2)
        assert [sample(logits, params, position) for position in range(20)] == one
    finally:
        torch.set_num_threads(before)


def test_frequencies_follow_the_probabilities() -> None:
    """At temperature 1 tokens come as often as their logits say."""
    assert frequencies(SamplingParams(seed=3), 4000) == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.03)


def test_temperature_sharpens() -> None:
    """At temperature 0.5 probabilities are squared and rescaled."""
    squares = [0.25, 0.0625, 0.0225, 0.01]
    expected = [square / sum(squares) for square in squares]
    assert frequencies(SamplingParams(temperature=0.5, seed=3), 4000) == pytest.approx(expected, abs=0.03)


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    """0.5 + 0.25 reach 0.7, so the other two are never drawn."""
    drawn = frequencies(SamplingParams(top_p=0.7, seed=4), 2000)
    assert drawn[2:] == [0.0, 0.0]
    assert drawn[:2] == pytest.approx([2 / 3, 1 / 3], abs=0.04)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.5001, 2), (0.75, 2), (0.91, 4), (1.0, 4), (0.0, 1)])
def test_the_nucleus_is_minimal(top_p: float, kept: int) -> None:
    """A token is in only if those above it fall short."""
    logits = torch.log2(torch.tensor([0.5, 0.25, 0.125, 0.125])) * math.log(2)
    drawn = frequencies(SamplingParams(top_p=top_p, seed=5), 400, logits.double())
    assert sum(frequency > 0 for frequency in drawn) == kept


def test_the_nucleus_of_a_large_vocabulary_equals_a_full_sort() -> None:
    """Sorting only the candidates that can be in loses none that is."""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(8), dtype=torch.float64) * 3
    probabilities, order = torch.softmax(logits, -1).sort(descending=True)
    allowed = set(order[: int((probabilities.cumsum(0) < 0.8).sum()) + 1].tolist())
    drawn = {sample(logits, SamplingParams(top_p=0.8, seed=6), position) for position in range(3000)}
    assert drawn <= allowed
    assert len(drawn) > len(allowed) / 2


def test_ruled_out_tokens_are_never_drawn() -> None:
    """-inf is probability 0, also at the ends of the vocabulary and for any random number."""
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    assert {sample(logits, SamplingParams(seed=7), position) for position in range(300)} == {1, 3}


def test_extreme_temperatures_stay_finite() -> None:
    """Next to nothing is greedy; a great deal is uniform."""
    assert frequencies(SamplingParams(temperature=1e-300, seed=1), 50)[0] == 1.0
    assert frequencies(SamplingParams(temperature=1e300, seed=1), 2000) == pytest.approx([0.25] * 4, abs=0.04)


def test_uniform_numbers_are_in_range_and_even() -> None:
    """[0, 1), mean a half, and different for neighbours."""
    numbers = [uniform(seed, position) for seed in range(20) for position in range(100)]
    assert all(0 <= number < 1 for number in numbers)
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.02)
    assert len(set(numbers)) == len(numbers)


def test_the_random_numbers_are_pinned() -> None:
    """Nodes of different versions must draw alike: these values never change."""
    assert [uniform(1234, position) for position in (0, 1, 2**53 - 1)] == [
        0.20197109303133154,
        0.8749695792381472,
        0.7755386832703293,
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1), SamplingParams(top_p=0.5, seed=1)])
def test_non_finite_logits_are_a_typed_failure(bad: float, params: SamplingParams) -> None:
    """One NaN or +inf anywhere fails the step, never the node."""
    logits = LOGITS.clone()
    logits[2] = bad
    with pytest.raises(StepFailed) as caught:
        sample(logits, params, 11)
    assert caught.value.code == "non_finite_logits"
    assert caught.value.fields == {"position": 11}


def test_logits_that_rule_everything_out_are_a_typed_failure() -> None:
    """All -inf leaves nothing to draw."""
    with pytest.raises(StepFailed, match="non_finite_logits"):
        sample(torch.full((4,), -math.inf), SamplingParams(seed=1), 0)


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=-0.1), SamplingParams(top_p=1.5), SamplingParams(top_p=-1)]
)
def test_parameters_out_of_range_are_refused(params: SamplingParams) -> None:
    """A node does not trust its gateway to have checked."""
    with pytest.raises(StepFailed) as caught:
        sample(LOGITS, params, 0)
    assert caught.value.code == "bad_step"


def test_logits_of_a_wrong_shape_are_our_own_bug() -> None:
    """Not a peer's fault."""
    with pytest.raises(ValueError, match=r"\[V\]"):
        sample(torch.zeros(2, 3), GREEDY, 0)
