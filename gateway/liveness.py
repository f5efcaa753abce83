"""Whether a node is alive and works, judged from what comes over its link.

Theory of operation. Whoever serves the link reports what happens (`note_...`) and calls `tick` some times
a second. Time here is *attentive*: each tick counts at most twice its interval, so a stretch in which this
process did not run (a suspended laptop, a long garbage collection) is never taken for a node's silence.
Two questions are answered:

- `silence_s`: has nothing at all come for too long? Then the node, or the way to it, is gone. Frames on
  their way extend the limit, since heartbeats wait behind them.
- `is_stalled`: has the node finished no step for longer than the step that is waited for may take? Each
  finished step, ours or another gateway's as heartbeats report it, begins the wait anew: a busy node is
  not a stalled one.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.pacing import LINK_BYTES_PER_S_MIN

TICK_S = 0.25
"""How often deadlines are looked at."""
SILENCE_MAX_S = 2.0
"""Four unanswered heartbeats: the node, or the way to it, is gone."""
SILENCE_EXTENSION_MAX_S = 30.0
"""Frames on their way extend the silence by what they need on the slowest link, but never by more than this."""
STEP_WAIT_MAX_S = 600.0
"""Bound of one wait, however busy its node is with other steps."""


@dataclass(slots=True)
class Liveness:
    """What is known of one link's node; seconds of attentive time.

    Args:
        now_s: Attentive time.
        sent_bytes: Payload handed to the link so far.
        arrived_bytes: Of these, how many are known to have arrived.
        forsaken_s: The longest allowance of a step that nobody waits for any more, since the last
            progress: the node may still be computing it.
    """

    now_s: float = 0.0
    sent_bytes: int = 0
    arrived_bytes: int = 0
    forsaken_s: float = 0.0
    _ticked_at: float = 0.0
    _heard_at: float = 0.0
    _progress_at: float = 0.0

    def begin(self, clock_s: float) -> None:
        """A link has opened."""
        self._ticked_at = clock_s
        self._heard_at = self._progress_at = self.now_s
        self.arrived_bytes = self.sent_bytes
        self.forsaken_s = 0.0

    def tick(self, clock_s: float) -> None:
        """Time has passed."""
        self.now_s += min(clock_s - self._ticked_at, 2 * TICK_S)
        self._ticked_at = clock_s

    def note_sent(self, payload_bytes: int) -> int:
        """A frame is handed to the link; returns the mark that its answer proves to have arrived."""
        self.sent_bytes += payload_bytes
        return self.sent_bytes

    def note_arrived(self, mark: int) -> None:
        """The frame of this mark was answered, so all before it have arrived."""
        self.arrived_bytes = max(self.arrived_bytes, mark)

    def note_heard(self) -> None:
        """Something has come."""
        self._heard_at = self.now_s

    def note_progress(self) -> None:
        """The node has finished a step."""
        self._progress_at = self.now_s
        self.forsaken_s = 0.0

    def note_forsaken(self, allowance_s: float) -> None:
        """Nobody waits any more for a step that may take so long."""
        self.forsaken_s = max(self.forsaken_s, allowance_s)

    @property
    def quiet_s(self) -> float:
        """How long nothing has come, whether that is too long or not."""
        return self.now_s - self._heard_at

    def silence_s(self) -> float | None:
        """How long nothing has come, when that is too long."""
        on_their_way_s = (self.sent_bytes - self.arrived_bytes) / LINK_BYTES_PER_S_MIN
        limit_s = SILENCE_MAX_S + min(on_their_way_s, SILENCE_EXTENSION_MAX_S)
        return self.quiet_s if self.quiet_s >= limit_s else None

    def is_stalled(self, asked_at: float, allowance_s: float) -> bool:
        """Whether a wait that began at `asked_at` is over.

        Args:
            asked_at: `now_s` of its beginning.
            allowance_s: What the longest step that the node may be computing may take.
        """
        waited_s = self.now_s - asked_at
        idle_s = min(waited_s, self.now_s - self._progress_at)
        return idle_s > max(allowance_s, self.forsaken_s) or waited_s > STEP_WAIT_MAX_S
