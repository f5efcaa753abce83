"""Threads for long prompts: few at once, so that tokenizing takes neither all cores nor all memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.openai_errors import ApiError, retry_after

LONG_ENCODES_MAX = 2
"""Each holds up to some hundred bytes per byte of its prompt while it runs."""
LONG_ENCODES_WAITING_MAX = 64
"""Each holds its request's body while it waits."""
RETRY_AFTER_S = 2

T = TypeVar("T")


class EncodePool:
    """Runs work in threads, `LONG_ENCODES_MAX` at once; further work waits in turn, up to a limit."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LONG_ENCODES_MAX, thread_name_prefix="encode")
        self._held = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Run it, and return or raise what it does. Work that is cancelled while it waits never begins.

        Raises:
            ApiError: 429 when too much waits already.
        """
        if self._held >= LONG_ENCODES_MAX + LONG_ENCODES_WAITING_MAX:
            message = f"{self._held} long prompts are being read already. Please try again soon."
            headers = retry_after(RETRY_AFTER_S)
            raise ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)
        self._held += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._held -= 1
