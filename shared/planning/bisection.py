"""The least limit that can be kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

TOLERANCE: Final = 1e-10
"""Relative: far below what any time is known to, far above what doubles round to."""


def least_feasible(feasible: Callable[[float], bool], known: float) -> float:
    """The least value above 0 for which `feasible` holds, within `TOLERANCE`, and for which it does hold.

    Args:
        feasible: Holds for every value above one for which it holds.
        known: A value for which it holds.
    """
    low, high = 0.0, known
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        if feasible(middle):
            high = middle
        else:
            low = middle
    return high
