"""The system's clock, and the one that tests move."""

from __future__ import annotations

import asyncio

from shared.clock import Clock, SystemClock
from tests.support.fake_clock import FakeClock


async def test_the_system_clock_moves_on_its_own():
    """Sleeping returns, and time has not gone back."""
    clock: Clock = SystemClock()
    before_s = clock.monotonic()
    await clock.sleep(0.001)
    await clock.sleep(-1)
    assert clock.monotonic() > before_s


async def test_the_fake_clock_wakes_each_sleeper_at_its_moment():
    """Sleepers wake in the order of their moments, at them, also those that sleep again."""
    clock = FakeClock(start_s=0.0)
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, *naps_s: float) -> None:
        for nap_s in naps_s:
            await clock.sleep(nap_s)
            woken.append((name, clock.monotonic()))

    tasks = [asyncio.create_task(sleeper("a", 3.0)), asyncio.create_task(sleeper("b", 1.0, 1.0))]
    await clock.advance(0.5)
    assert (woken, clock.sleepers) == ([], 2)
    await clock.advance(10.0)
    assert woken == [("b", 1.0), ("b", 2.0), ("a", 3.0)]
    assert clock.monotonic() == 10.5
    clock.jump(1.0)
    assert clock.monotonic() == 11.5
    await asyncio.gather(*tasks)
