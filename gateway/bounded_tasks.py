"""Several pieces of one call's work at once, but never too many."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator

Job = Callable[[], Awaitable[None]]


async def run_bounded(jobs: Iterable[Job], *, at_once: int) -> None:
    """Run all jobs, begun in their order, each from its beginning to its end in one task.

    Args:
        jobs: What to do.
        at_once: How many may be under way; the next begins when one has ended.

    Raises:
        Exception: That of the first job to fail, as it is; the others are cancelled and awaited before.
    """
    waiting = iter(jobs)
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(_work(waiting))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def _work(waiting: Iterator[Job]) -> None:
    for job in waiting:
        await job()
