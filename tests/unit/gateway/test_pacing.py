"""Deadlines from measured durations."""

from __future__ import annotations

import pytest

from gateway.pacing import (
    ALLOWANCE_FACTOR,
    ALLOWANCE_FLOOR_S,
    LINK_BYTES_PER_S_MIN,
    SMOOTHING,
    UNKNOWN_ALLOWANCE_S,
    Pace,
)


def test_an_unmeasured_node_gets_a_generous_default() -> None:
    """The first step may have to read weights from disk."""
    assert Pace().allowance_s(1) == UNKNOWN_ALLOWANCE_S
    assert Pace().allowance_s(1, patience=8.0) == UNKNOWN_ALLOWANCE_S


def test_prefills_are_expected_per_token_and_never_below_one_step() -> None:
    """A short step of a node whose time goes into reading weights takes as long as a decode."""
    pace = Pace()
    pace.record(100, 1.0)
    pace.record(1, 0.5)
    assert pace.expected_s(200) == pytest.approx(2.0)
    assert pace.expected_s(3) == pytest.approx(0.5)
    assert pace.expected_s(1) == pytest.approx(0.5)


def test_before_the_first_decode_a_whole_prefill_bounds_it() -> None:
    """A slow node is not called stalled at its second step."""
    pace = Pace()
    pace.record(256, 15.0)
    assert pace.expected_s(1) == pytest.approx(15.0)


def test_before_the_first_prefill_each_token_counts_as_a_decode() -> None:
    """The other bound."""
    pace = Pace()
    pace.record(1, 0.1)
    assert pace.expected_s(10) == pytest.approx(1.0)


def test_the_average_moves_towards_the_newest() -> None:
    """A node that has become slower gets more time."""
    pace = Pace()
    pace.record(1, 1.0)
    pace.record(1, 2.0)
    assert pace.expected_s(1) == pytest.approx(1.0 + SMOOTHING)


def test_the_allowance_adds_a_floor_a_factor_and_the_transfer() -> None:
    """Each term has its reason; see the module."""
    pace = Pace()
    pace.record(1, 0.25)
    assert pace.allowance_s(1) == pytest.approx(ALLOWANCE_FLOOR_S + ALLOWANCE_FACTOR * 0.25)
    assert pace.allowance_s(1, 3 * LINK_BYTES_PER_S_MIN) == pytest.approx(ALLOWANCE_FLOOR_S + 1 + 3)
