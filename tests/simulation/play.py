"""Runs schedules, one after the other, and says which failed and how."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.simulation.schedule import Schedule, draw_schedule
from tests.simulation.virtual_loop import VirtualLoop
from tests.simulation.world import World

SCHEDULES_PER_COLLECTION = 100
"""Cycles are collected so often, instead of whenever Python thinks fit."""
TURNS_TO_END_MAX = 1_000
"""Of a loop whose simulation has failed, for its tasks to end."""


@dataclass(frozen=True)
class Failure:
    """A schedule after which something did not hold."""

    schedule: Schedule
    error: BaseException

    @property
    def reason(self) -> str:
        """In one line."""
        error = self.error
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def play(schedule: Schedule, loop: VirtualLoop) -> Counter[str]:
    """Run one schedule; returns what happened.

    Raises:
        AssertionError: Something does not hold, or anything else that came out of the gateway.
    """
    world = World(schedule)
    loop.on_idle = world.on_idle
    loop.run_until_complete(world.play())
    return world.tally


def play_all(schedules: Iterable[Schedule]) -> Iterator[Counter[str] | Failure]:
    """Run them all, each with what came of it."""
    loop = VirtualLoop()
    gc.collect()
    gc.disable()
    try:
        for number, schedule in enumerate(schedules, 1):
            result: Counter[str] | Failure
            try:
                result = play(schedule, loop)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
                result = Failure(schedule, error)
                discard(loop)
                loop = VirtualLoop()
            yield result
            if number % SCHEDULES_PER_COLLECTION == 0:
                gc.collect()
    finally:
        gc.enable()
        loop.close()


def play_seeds(seeds: Iterable[int]) -> Iterator[Counter[str] | Failure]:
    """Run the schedules of these seeds."""
    return play_all(map(draw_schedule, seeds))


def discard(loop: VirtualLoop) -> None:
    """End what is left of a simulation that has failed."""
    loop.set_exception_handler(lambda _loop, _context: None)
    loop.on_idle = loop.stop
    for _ in range(TURNS_TO_END_MAX):
        tasks = asyncio.all_tasks(loop)
        if not tasks:
            break
        for task in tasks:
            task.cancel()
        loop.call_soon(loop.stop)
        loop.run_forever()
    loop.close()
