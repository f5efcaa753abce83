"""An event loop for which waiting costs nothing: when no task can run, virtual time moves to the next sleeper."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable


class _NothingArrives(selectors.SelectSelector):
    """Asks for more to do where another selector would wait."""

    def __init__(self, on_idle: Callable[[], None]) -> None:
        super().__init__()
        self._on_idle = on_idle

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Nothing ever comes from outside."""
        if timeout is None:
            self._on_idle()
        elif timeout > 0:
            raise AssertionError("something waits for the machine's own clock")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs one simulation after the other; `on_idle` is what makes something happen when nothing can run."""

    def __init__(self) -> None:
        self.on_idle: Callable[[], None] = _deadlock
        super().__init__(_NothingArrives(self._idle))

    def _idle(self) -> None:
        self.on_idle()


def _deadlock() -> None:
    raise AssertionError("nothing runs and nothing waits for time: a deadlock")
