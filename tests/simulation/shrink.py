"""Cuts a failing schedule down to what it takes to fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.simulation.play import Failure, play_all
from tests.simulation.schedule import Schedule

PARTS = ("calls", "events", "fates")


def shrink(schedule: Schedule) -> Failure:
    """The smallest schedule that still fails, as far as leaving out calls, events and fates makes it smaller.

    Raises:
        ValueError: It does not fail.
    """
    failure = _failure_of(schedule)
    if failure is None:
        raise ValueError(f"the schedule of seed {schedule.seed} does not fail")
    before = None
    while before != failure.schedule:
        before = failure.schedule
        for part in PARTS:
            failure = _shrink_part(failure, part)
    return failure


def _failure_of(schedule: Schedule) -> Failure | None:
    (result,) = play_all([schedule])
    return result if isinstance(result, Failure) else None


def _shrink_part(failure: Failure, part: str) -> Failure:
    """Leave out half of a part's items at a time, then a quarter, down to single ones."""
    size = max(1, len(getattr(failure.schedule, part)) // 2)
    while True:
        start = 0
        while start < len(items := getattr(failure.schedule, part)):
            smaller = _failure_of(_with(failure.schedule, part, (*items[:start], *items[start + size :])))
            if smaller is None:
                start += size
            else:
                failure = smaller
        if size == 1:
            return failure
        size //= 2


def _with(schedule: Schedule, part: str, items: tuple[Any, ...]) -> Schedule:
    values: dict[str, Any] = {part: items}
    return replace(schedule, **values)
