"""Jittered exponential back-off: how long to wait before the next of many attempts."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random


@dataclass(slots=True)
class Backoff:
    """Delays that double up to a ceiling, each drawn from the upper half of its bound.

    The lower half is left out so that the n-th attempt is never immediate; the upper half is random so
    that a thousand nodes whose gateway came back do not dial it in the same millisecond.

    Args:
        rng: Source of the jitter.
        first_s: Bound of the first delay.
        max_s: Bound that no delay exceeds, however many attempts have failed.
        factor: By what each bound exceeds the one before.

    Raises:
        ValueError: If the bounds are not 0 < first_s ≤ max_s, or the factor is below 1.
    """

    rng: Random
    first_s: float = 0.05
    max_s: float = 5.0
    factor: float = 2.0
    _bound_s: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.max_s or self.factor < 1:
            raise ValueError(f"back-off needs 0 < first_s <= max_s and factor >= 1, got {self}")
        self._bound_s = self.first_s

    def next_delay_s(self) -> float:
        """Seconds to wait now; the next call's bound is larger."""
        bound_s = self._bound_s
        self._bound_s = min(bound_s * self.factor, self.max_s)
        return self.rng.uniform(bound_s / 2, bound_s)

    def reset(self) -> None:
        """Start again from the first bound: an attempt has succeeded."""
        self._bound_s = self.first_s
