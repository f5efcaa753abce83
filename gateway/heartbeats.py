"""Heartbeats that have been asked and not been answered."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from shared.errors import LinkClosed, MeshError
from shared.messages import Heartbeat

HEARTBEATS_OPEN_MAX = 64
"""Heartbeats whose answers are awaited; the silence limit closes the link long before."""


@dataclass(slots=True)
class Beat:
    """One heartbeat.

    Args:
        asked_at: Clock.
        sent_mark: What of our frames its answer proves to have arrived.
        answered: Who waits for it, if anybody does.
    """

    asked_at: float
    sent_mark: int
    answered: asyncio.Future[None] | None

    def end(self, error: MeshError | None = None) -> None:
        """Tell who waits for it."""
        if self.answered is None or self.answered.done():
            return
        if error is None:
            self.answered.set_result(None)
        else:
            self.answered.set_exception(error)


@dataclass(slots=True)
class Heartbeats:
    """The open heartbeats of one node's link."""

    _seq: int = 0
    _open: dict[int, Beat] = field(default_factory=dict)

    def ask(self, beat: Beat, *, name: str, sessions: int, waiting: int) -> Heartbeat:
        """The message that asks, and says how many sessions we have at the node and how many more we would begin.

        Raises:
            LinkClosed: `silent`: too many were asked in vain.
        """
        if len(self._open) >= HEARTBEATS_OPEN_MAX:
            raise LinkClosed("silent", f"{name} answers no heartbeat", limit=HEARTBEATS_OPEN_MAX)
        self._seq += 1
        self._open[self._seq] = beat
        return Heartbeat(seq=self._seq, sessions=sessions, waiting=waiting)

    def take(self, reply: Heartbeat) -> Beat | None:
        """The heartbeat that this answers, if it is still awaited."""
        return self._open.pop(reply.seq, None)

    def fail_all(self, error: MeshError) -> None:
        """Nobody will answer any more."""
        for beat in self._open.values():
            beat.end(error)
        self._open.clear()
