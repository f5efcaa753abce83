"""When a process that ended is started again, and when no more. Pure."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Final

from shared.backoff import Backoff

ENDS_MAX: Final = 5
"""So many ends within `WINDOW_S`, and it is broken, not unlucky."""
WINDOW_S: Final = 60.0
FIRST_DELAY_S: Final = 0.25
DELAY_MAX_S: Final = 5.0
"""All delays of one window together are shorter than the window, so that a process that cannot live is found out."""


class Restarts:
    """Counts the ends of one process.

    Args:
        rng: For the jitter between attempts.
    """

    def __init__(self, rng: Random) -> None:
        self._backoff = Backoff(rng, FIRST_DELAY_S, DELAY_MAX_S)
        self._ends_s: deque[float] = deque(maxlen=ENDS_MAX)

    @property
    def recent(self) -> int:
        """How many ends the window held when the last one was counted."""
        return len(self._ends_s)

    def count_end(self, now_s: float) -> float | None:
        """Count an end.

        Args:
            now_s: Monotonic time.

        Returns:
            Seconds to wait before starting it again; None when it has ended `ENDS_MAX` times within `WINDOW_S`.
        """
        while self._ends_s and now_s - self._ends_s[0] > WINDOW_S:
            self._ends_s.popleft()
        if not self._ends_s:
            self._backoff.reset()
        self._ends_s.append(now_s)
        return None if len(self._ends_s) == ENDS_MAX else self._backoff.next_delay_s()
