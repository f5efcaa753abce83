"""Log-probabilities by value, against torch, and with ties and infinities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shard.logprobs import LOGPROB_MIN, log_probs
from shard.top_ids import top_ids
from shared.errors import StepFailed


def test_rows_are_the_log_softmax() -> None:
    """Column 0 is the token itself, the rest the likeliest."""
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1)) * 4
    tokens = np.array([7, 499, 0])
    rows = log_probs(logits.numpy(), tokens, 5)
    expected = torch.log_softmax(logits.double(), -1)
    best = expected.topk(5)
    assert rows.ids.dtype == np.int32
    assert rows.values.dtype == np.float32
    assert rows.ids[:, 0].tolist() == tokens.tolist()
    assert rows.ids[:, 1:].tolist() == best.indices.tolist()
    np.testing.assert_allclose(rows.values[:, 1:], best.values, rtol=1e-6)
    np.testing.assert_allclose(rows.values[:, 0], expected[range(3), tokens], rtol=1e-6)


def test_of_equals_the_lowest_id_is_first() -> None:
    """Also where the cut goes through them."""
    logits = np.zeros((1, 100), np.float32)
    logits[0, [90, 50]] = 1.0
    assert log_probs(logits, np.array([3]), 4).ids.tolist() == [[3, 50, 90, 0, 1]]


def test_the_impossible_is_finite() -> None:
    """JSON knows no infinity."""
    logits = np.array([[0.0, -math.inf, -1e30]], np.float32)
    rows = log_probs(logits, np.array([1]), 3)
    assert rows.ids.tolist() == [[1, 0, 2, 1]]
    assert rows.values[0].tolist() == [LOGPROB_MIN, 0.0, LOGPROB_MIN, LOGPROB_MIN]


@pytest.mark.parametrize(("count", "columns"), [(0, 1), (1, 2), (3, 4), (32, 4)])
def test_no_more_alternatives_than_tokens(count: int, columns: int) -> None:
    """A tiny vocabulary has fewer than may be asked for."""
    rows = log_probs(np.array([[0.0, 1.0, 2.0]], np.float32), np.array([0]), count)
    assert rows.values.shape == rows.ids.shape == (1, columns)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_fail(bad: float) -> None:
    """As for a draw."""
    with pytest.raises(StepFailed, match="non_finite_logits"):
        log_probs(np.array([[0.0, bad]], np.float32), np.array([0]), 0)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64, 999, 1000, 5000])
def test_top_ids_are_those_of_a_stable_sort(count: int) -> None:
    """However few are sorted, and with many equals."""
    values = np.round(np.random.default_rng(5).standard_normal(1000), 1)
    assert top_ids(values, count).tolist() == np.argsort(-values, kind="stable")[:count].tolist()


def test_a_row_of_nothing_but_nan_says_so_whatever_is_asked_of_it() -> None:
    """A model that overflows is no fault of the node's, with alternatives as without."""
    for count in (0, 5):
        with pytest.raises(StepFailed, match="non_finite_logits"):
            log_probs(np.full((1, 50), np.nan, np.float32), np.array([3]), count)
