"""A clock that tests move by hand."""

from __future__ import annotations

import asyncio
import heapq
import math
from itertools import count

TURNS_PER_WAKE = 20
"""Turns of the event loop that a woken task gets before time moves on: enough for a few awaits in a row."""


class FakeClock:
    """A `shared.clock.Clock` whose time stands still until `advance` is called."""

    def __init__(self, start_s: float = 1_000.0) -> None:
        self._now_s = start_s
        self._order = count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        """Seconds from an arbitrary start."""
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        """Return once the test has advanced the clock by `seconds`."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        waiter = asyncio.get_running_loop().create_future()
        due_s = max(self._now_s + seconds, math.nextafter(self._now_s, math.inf))  # time passes, however little
        heapq.heappush(self._sleepers, (due_s, next(self._order), waiter))
        await waiter

    def skip(self, seconds: float) -> None:
        """Move time where nobody sleeps.

        Raises:
            ValueError: If somebody does: `advance` wakes them.
        """
        if self.sleepers:
            raise ValueError("somebody sleeps")
        self._now_s += seconds

    @property
    def sleepers(self) -> int:
        """How many tasks sleep now."""
        return sum(not waiter.done() for _, _, waiter in self._sleepers)

    async def advance(self, seconds: float) -> None:
        """Move time, waking each sleeper at its own moment and letting it run before time moves on."""
        end_s = self._now_s + seconds
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            due_s, _, waiter = heapq.heappop(self._sleepers)
            self._now_s = max(self._now_s, due_s)
            if not waiter.done():
                waiter.set_result(None)
                await _settle()
        self._now_s = end_s
        await _settle()

    def jump(self, seconds: float) -> None:
        """Move time for code that only reads it; sleepers notice at the next `advance`."""
        self._now_s += seconds


async def _settle() -> None:
    for _ in range(TURNS_PER_WAKE):
        await asyncio.sleep(0)
