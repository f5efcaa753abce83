"""Thousands of random schedules: tokens stay right, limits are kept, every request ends once, and nothing is left.

A failure names its seed: ``python -m tests.simulation --seed N -v`` plays it again. `make sim` runs more of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import structlog

from tests.simulation.crowd import draw_crowd
from tests.simulation.mutations import MUTATIONS, broken
from tests.simulation.node import name_of
from tests.simulation.play import Failure, play_all, play_seeds
from tests.simulation.schedule import EVENTS, FATES, draw_schedule
from tests.simulation.shrink import shrink
from tests.simulation.world import FAILURES, summary

SCHEDULES = 2_000
BATCH = 200
CROWDS = 50
MUTATION_SEEDS_MAX = 200
"""A broken rule that so many schedules do not notice would not be noticed at all."""
REPLAYED_SHARE_MIN = 0.4
"""Of all schedules; the others are without faults, or meet them where nothing is lost."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of faults are logged otherwise."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@cache
def played(batch: int) -> list[Counter[str] | Failure]:
    """What came of a batch of schedules; each is run once, whichever test comes first (a file is one process's)."""
    return list(play_seeds(range(batch * BATCH, (batch + 1) * BATCH)))


@pytest.mark.parametrize("batch", range(SCHEDULES // BATCH), ids="batch{}".format)
def test_whatever_happens_what_must_hold_holds(batch: int) -> None:
    """Tokens are the reference's, no budget is exceeded, each request ends in one way, and nothing is left over."""
    failures = [result for result in played(batch) if isinstance(result, Failure)]
    assert not failures, "; ".join(
        f"python -m tests.simulation --seed {failure.schedule.seed} -v: {failure.reason}" for failure in failures
    )


@pytest.mark.timeout(300)
def test_everything_that_can_happen_happens() -> None:
    """A schedule in which nothing goes wrong would prove nothing: every kind of fault, event and end is met."""
    results = [result for batch in range(SCHEDULES // BATCH) for result in played(batch)]
    total = summary([result for result in results if isinstance(result, Counter)])
    for kind in EVENTS:
        assert total[f"event {kind}"] > SCHEDULES / 50, kind
    for fate in {name_of(draw(Random(seed))) for draw in FATES for seed in range(100)}:
        assert total[fate] > 0, fate
    for figure in ("replays", "full_replays", "moves", "misses", "late answers", "journal drops"):
        assert total[f"gateway {figure}"] > SCHEDULES / 10, figure
    for rare in (
        "gateway reroutes",
        "lost_fork",
        "budget_exceeded",
        "evicted for room",
        "joined late",
        "places given",
        "end left",
        "end cut off",
        "planned",
        "planned anew",
    ):
        assert total[rare] > 0, rare
    ended_badly = {name.removeprefix("end ") for name in total if name.startswith("end ")} & FAILURES
    assert {"node_lost", "no_route", "queue_full", "queue_timeout"} <= ended_badly
    assert total["schedules with a replay"] > REPLAYED_SHARE_MIN * total["schedules"]
    assert total["end complete"] > SCHEDULES


@pytest.mark.parametrize("rule", MUTATIONS)
def test_a_broken_rule_is_found(rule: str) -> None:
    """With any one rule of the gateway broken, some schedule fails."""
    with broken(rule):
        results = play_seeds(range(MUTATION_SEEDS_MAX))
        assert any(isinstance(result, Failure) for result in results), f"nobody notices that {rule}"


def test_sessions_in_a_crowd_do_not_wait_for_each_other() -> None:
    """Each is where others have to go; nobody is lost for it, as one in ten of these schedules were."""
    results = list(play_all(map(draw_crowd, range(CROWDS))))
    failures = [result for result in results if isinstance(result, Failure)]
    assert not failures, "; ".join(f"draw_crowd({failure.schedule.seed}): {failure.reason}" for failure in failures)
    assert summary([result for result in results if isinstance(result, Counter)])["places given"] > CROWDS / 10


def test_a_seed_is_its_schedule() -> None:
    """The same seed gives the same schedule and the same course of events."""
    assert draw_schedule(7) == draw_schedule(7) != draw_schedule(8)
    (one,), (again,) = play_seeds([7]), play_seeds([7])
    assert isinstance(one, Counter)
    assert one == again


def test_a_failing_schedule_is_cut_down() -> None:
    """What is left is smaller, fails by itself, and fails no more when anything of it is left out."""
    with broken("a move gives no place back"):
        failures = (result for result in play_seeds(range(MUTATION_SEEDS_MAX)) if isinstance(result, Failure))
        failing = next(failures).schedule
        small = shrink(failing).schedule
        assert len(small.fates) + len(small.events) <= 3 < len(failing.fates) + len(failing.events)
        assert len(small.calls) == 1
        with pytest.raises(ValueError, match="does not fail"):
            shrink(replace(small, fates=(), events=()))
