"""Jobs of one call: in order, never too many, the first failure ends them all."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from gateway.bounded_tasks import run_bounded


async def test_jobs_begin_in_order_and_never_too_many_at_once():
    """The next begins when one has ended."""
    begun: list[int] = []
    active = active_max = 0

    async def job(index: int) -> None:
        nonlocal active, active_max
        begun.append(index)
        active += 1
        active_max = max(active_max, active)
        await asyncio.sleep(0)
        active -= 1

    await run_bounded([partial(job, index) for index in range(7)], at_once=3)
    assert begun == list(range(7))
    assert active_max == 3


async def test_the_first_failure_is_raised_as_it_is_and_ends_the_others():
    """No group wraps it, nothing is left running, nothing more begins."""
    ends: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await run_bounded([waits, fails, waits, waits], at_once=2)
    assert ends == ["cancelled"]


async def test_nothing_to_do_ends_at_once():
    """No job, no task."""
    await run_bounded([], at_once=0)
