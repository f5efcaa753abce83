"""Signals that ask a command to stop, each wish counted once.

`make` passes SIGTERM on to what it runs, so a SIGTERM to the whole process group arrives twice within a moment. Only
a signal that comes after `REPEAT_WINDOW_S` is a second wish, which ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import Final

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_WINDOW_S: Final = 1.0
"""Longer than a signal needs through `make`, shorter than a person who means it."""


class Wishes:
    """Tells a new wish to stop from the same one arriving again.

    Args:
        monotonic: The clock.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._counted_at: float | None = None

    def is_new(self) -> bool:
        """Count a signal that arrives now; false if it belongs to the one counted last."""
        now = self._monotonic()
        if self._counted_at is not None and now - self._counted_at < REPEAT_WINDOW_S:
            return False
        self._counted_at = now
        return True


def interrupt_on_stop_signals(wishes: Wishes) -> None:
    """Let every stop signal raise `KeyboardInterrupt` in the main thread, once per wish."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if wishes.is_new():
            raise KeyboardInterrupt

    for number in STOP_SIGNALS:
        signal.signal(number, interrupt)


@contextlib.asynccontextmanager
async def stop_signals(wishes: Wishes) -> AsyncIterator[asyncio.Queue[signal.Signals]]:
    """A queue of the wishes to stop that arrive while the block runs."""
    arrived: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def arrive(number: signal.Signals) -> None:
        if wishes.is_new():
            arrived.put_nowait(number)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, arrive, number)
    try:
        yield arrived
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
