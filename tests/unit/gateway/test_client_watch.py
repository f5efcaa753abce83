"""Work for a client that stays, and for one that leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.client_watch import run_for_client
from gateway.openai_errors import ApiError
from gateway.request_record import ClientLeft


async def stays() -> Any:
    """The `receive` of a client that sends nothing more."""
    await asyncio.Event().wait()


async def leaves() -> Any:
    """The `receive` of one that is gone."""
    await asyncio.sleep(0)
    return {"type": "http.disconnect"}


class Work:
    """Waits until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = False

    async def run(self) -> None:
        """Record the cancellation."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def test_the_result_and_the_failure_come_through():
    """As they are."""

    async def gives() -> int:
        return 7

    async def fails() -> int:
        raise KeyError("mine")

    assert await run_for_client(stays, gives()) == 7
    with pytest.raises(KeyError, match="mine"):
        await run_for_client(stays, fails())


async def test_a_client_that_leaves_cancels_the_work():
    """And nobody is answered."""
    work = Work()
    with pytest.raises(ClientLeft):
        await run_for_client(leaves, work.run())
    assert work.cancelled


async def test_a_shutdown_cancels_the_work_and_says_so():
    """The client is still there, and gets a 503."""
    work = Work()
    call = asyncio.create_task(run_for_client(stays, work.run()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(ApiError) as caught:
        await call
    assert caught.value.status == 503
    assert work.cancelled
