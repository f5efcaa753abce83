"""A caller who leaves stops the work that was done for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from litestar.types import Receive

from gateway.openai_errors import not_ready
from gateway.request_record import ClientLeft

T = TypeVar("T")


async def client_gone(receive: Receive) -> None:
    """Return once the client has closed the connection. Its request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_for_client(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run what a whole response needs, in a task of its own, and cancel it as soon as the client is gone.

    Raises:
        ClientLeft: The client was gone before the end.
        ApiError: 503: the server's time for draining is over.
        Exception: What the work fails with.
    """
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(_settled(work))
        watch = tasks.create_task(_cancel_without_client(receive, running))
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            failure = not_ready("The server is shutting down.")
        finally:
            running.cancel()
            watch.cancel()
    if failure is not None:
        raise failure
    if running.cancelled():
        raise ClientLeft
    outcome = running.result()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def _settled(work: Coroutine[Any, Any, T]) -> T | Exception:
    """A failure as a value: no group wraps it, and it cancels nothing."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - the outermost frame of this task; `run_for_client` raises it
        return error


async def _cancel_without_client(receive: Receive, running: asyncio.Task[Any]) -> None:
    await client_gone(receive)
    running.cancel()
