"""Time as an argument: whoever waits or measures is given a clock, so tests can move it by hand."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What the rest of the code may ask of time."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back. May be read from any thread."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return once `seconds` have passed; at once if they are not positive."""
        ...


class SystemClock:
    """The machine's own time."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return once `seconds` have passed; other tasks of the event loop run meanwhile."""
        await asyncio.sleep(seconds)
