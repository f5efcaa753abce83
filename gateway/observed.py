"""What decode steps at one node have taken over the last minute, to be compared with what was planned."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 60.0
"""How far back figures reach."""
BUCKET_S = 5.0
"""Steps of so long are added up together, so that a minute costs twelve sums whatever the pace."""


@dataclass(slots=True)
class _Bucket:
    began_at: float
    steps: int = 0
    compute_us: int = 0
    queue_us: int = 0
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Means over the window, per decode step.

    Args:
        steps: How many there were; at least one.
        compute_s: The node's own compute.
        queue_s: Waiting at the node behind other steps.
        link_s: Everything else between asking and the answer: the way there and back, and both ends' handling.
    """

    steps: int
    compute_s: float
    queue_s: float
    link_s: float

    @property
    def token_s(self) -> float:
        """What a token takes at this node while nobody else's is in its way."""
        return self.compute_s + self.link_s


ALONE_SMOOTHING = 0.05
"""Weight of the newest step in the moving average; some seconds of an answer renew it."""
ALONE_STEPS_MIN = 20
"""Steps before the average counts: the first ones after a load are slow."""


@dataclass(slots=True)
class AloneSteps:
    """What a decode step computes while its node has no other: a moving average of one range."""

    steps: int = 0
    _compute_s: float = 0.0

    def record(self, compute_s: float) -> None:
        """Take in one step."""
        self.steps += 1
        weight = max(ALONE_SMOOTHING, 1 / self.steps)
        self._compute_s += weight * (compute_s - self._compute_s)

    @property
    def compute_s(self) -> float | None:
        """The average; None before there are enough steps, and for nodes that do not say."""
        return self._compute_s if self.steps >= ALONE_STEPS_MIN and self._compute_s > 0 else None


@dataclass(slots=True)
class Observed:
    """Sums of the last minute's steps of one node."""

    _buckets: deque[_Bucket] = field(default_factory=deque)

    def record(self, now_s: float, *, compute_us: int, queue_us: int, took_s: float) -> None:
        """Take in one decode step; `took_s` from asking to its answer."""
        if not self._buckets or now_s - self._buckets[-1].began_at >= BUCKET_S:
            self._buckets.append(_Bucket(now_s))
            self._forget(now_s)
        newest = self._buckets[-1]
        newest.steps += 1
        newest.compute_us += compute_us
        newest.queue_us += queue_us
        newest.took_s += took_s

    def last_minute(self, now_s: float) -> StepTimes | None:
        """The means; None when there was no step."""
        self._forget(now_s)
        steps = sum(bucket.steps for bucket in self._buckets)
        if not steps:
            return None
        compute_s = sum(bucket.compute_us for bucket in self._buckets) / 1e6 / steps
        queue_s = sum(bucket.queue_us for bucket in self._buckets) / 1e6 / steps
        took_s = sum(bucket.took_s for bucket in self._buckets) / steps
        link_s = max(0.0, took_s - compute_s - queue_s)
        return StepTimes(steps=steps, compute_s=compute_s, queue_s=queue_s, link_s=link_s)

    def clear(self) -> None:
        """The node has another range now."""
        self._buckets.clear()

    def _forget(self, now_s: float) -> None:
        while self._buckets and now_s - self._buckets[0].began_at >= WINDOW_S:
            self._buckets.popleft()
