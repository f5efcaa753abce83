"""Waiting for the first of several things, with a limit on an injected clock."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from shared.clock import Clock
from shared.errors import MeshError


async def wait_first(clock: Clock, limit_s: float, *waits: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> bool:
    """Wait until one of `waits` is done, or `limit_s` have passed; returns whether one is done.

    Coroutines are cancelled on the way out, futures are left alone. What they raise is not raised here.
    For rare waits only (queueing, recovery): each costs a few tasks.
    """
    tasks = [asyncio.create_task(wait) for wait in waits if not isinstance(wait, asyncio.Future)]
    timer = asyncio.create_task(clock.sleep(limit_s))
    watched = [*tasks, *(wait for wait in waits if isinstance(wait, asyncio.Future))]
    try:
        await asyncio.wait([*watched, timer], return_when=asyncio.FIRST_COMPLETED)
        return any(wait.done() for wait in watched)
    finally:
        for task in (*tasks, timer):
            task.cancel()


def first_error(group: BaseExceptionGroup[MeshError]) -> MeshError:
    """What ended a task group whose tasks raise no groups of their own."""
    error = group.exceptions[0]
    assert isinstance(error, MeshError)  # noqa: S101 - see above
    return error


def raise_if_cancelled() -> None:
    """Go on with a cancellation that came in the very moment in which a task group ended by an error, and was lost."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
