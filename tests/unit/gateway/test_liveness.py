"""Silence and stalls, by value."""

from __future__ import annotations

import pytest

from gateway.liveness import SILENCE_EXTENSION_MAX_S, SILENCE_MAX_S, STEP_WAIT_MAX_S, TICK_S, Liveness
from gateway.pacing import LINK_BYTES_PER_S_MIN


class Ticking:
    """A liveness and the clock that it is told."""

    def __init__(self) -> None:
        self.liveness = Liveness()
        self.clock_s = 50.0
        self.liveness.begin(self.clock_s)

    def pass_time(self, seconds: float) -> Liveness:
        """Tick as often as a link does."""
        for _ in range(round(seconds / TICK_S)):
            self.clock_s += TICK_S
            self.liveness.tick(self.clock_s)
        return self.liveness


def test_silence_is_told_once_it_is_too_long() -> None:
    """And not while something comes."""
    ticking = Ticking()
    assert ticking.pass_time(SILENCE_MAX_S - TICK_S).silence_s() is None
    ticking.liveness.note_heard()
    assert ticking.pass_time(SILENCE_MAX_S - TICK_S).silence_s() is None
    assert ticking.pass_time(TICK_S).silence_s() == pytest.approx(SILENCE_MAX_S)


def test_bytes_on_their_way_extend_the_silence_until_they_have_arrived() -> None:
    """By what the slowest link needs for them, within a bound."""
    ticking = Ticking()
    first = ticking.liveness.note_sent(3 * LINK_BYTES_PER_S_MIN)
    assert ticking.pass_time(SILENCE_MAX_S + 2).silence_s() is None
    ticking.liveness.note_arrived(first)
    assert ticking.liveness.silence_s() is not None
    ticking.liveness.note_sent(1000 * LINK_BYTES_PER_S_MIN)
    assert ticking.pass_time(SILENCE_EXTENSION_MAX_S).silence_s() is not None


def test_an_older_arrival_takes_nothing_back() -> None:
    """Answers may come in another order than their frames left."""
    liveness = Liveness()
    first, second = liveness.note_sent(10), liveness.note_sent(10)
    liveness.note_arrived(second)
    liveness.note_arrived(first)
    assert liveness.arrived_bytes == 20


def test_a_pause_of_our_own_counts_as_two_ticks() -> None:
    """An hour asleep is half a second of attention."""
    ticking = Ticking()
    ticking.liveness.tick(ticking.clock_s + 3600)
    assert ticking.liveness.now_s == 2 * TICK_S


def test_a_wait_is_stalled_after_its_allowance_without_progress() -> None:
    """Progress begins it anew, whoever's step was finished."""
    ticking = Ticking()
    ticking.pass_time(100)
    asked_at = ticking.liveness.now_s
    assert not ticking.pass_time(5).is_stalled(asked_at, 5.0)
    ticking.liveness.note_progress()
    assert not ticking.pass_time(5).is_stalled(asked_at, 5.0)
    assert ticking.pass_time(TICK_S).is_stalled(asked_at, 5.0)


def test_a_step_nobody_waits_for_still_occupies_the_node() -> None:
    """Until the node has finished something."""
    ticking = Ticking()
    ticking.liveness.note_forsaken(20.0)
    ticking.liveness.note_forsaken(3.0)
    asked_at = ticking.liveness.now_s
    assert not ticking.pass_time(20).is_stalled(asked_at, 1.0)
    assert ticking.pass_time(TICK_S).is_stalled(asked_at, 1.0)
    ticking.liveness.note_progress()
    assert ticking.pass_time(2).is_stalled(asked_at, 1.0)


def test_no_wait_is_longer_than_the_bound() -> None:
    """However much the node finishes meanwhile."""
    ticking = Ticking()
    for _ in range(int(STEP_WAIT_MAX_S)):
        ticking.pass_time(1).note_progress()
    assert not ticking.liveness.is_stalled(0.0, 5.0)
    ticking.pass_time(TICK_S).note_progress()
    assert ticking.liveness.is_stalled(0.0, 5.0)
