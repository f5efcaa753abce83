"""Long prompts share few threads, and do not wait without bound."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gateway import encode_pool
from gateway.encode_pool import EncodePool
from gateway.openai_errors import ApiError


async def test_few_run_at_once_and_what_is_too_much_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Two run, one waits, the fourth is told to come back; then there is room again."""
    monkeypatch.setattr(encode_pool, "LONG_ENCODES_WAITING_MAX", 1)
    pool, release, running, most = EncodePool(), threading.Event(), [], []

    def work() -> None:
        running.append(1)
        most.append(len(running))
        assert release.wait(10)
        running.pop()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(pool.run(work))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await pool.run(work)
        release.set()
    assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "2")
    assert (len(most), max(most)) == (3, 2)
    assert await pool.run(lambda: 5) == 5
