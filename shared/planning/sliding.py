"""The inner loop of every search: extend routes by one node, for all ends at once.

Let `cost[a]` be the least time of a route that ends at cut `a`. With the next node holding ``[a, b)`` it takes
``cost[a] + fixed + per_work x (work[b] - work[a])``, so for each `b` the best `a` is the least of
``cost[a] - per_work x work[a]`` among those from which `b` can be reached. That set is a window that only moves
forward, and its least element is kept in a monotone queue: O(cuts) in all instead of O(cuts squared).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

NOT_REACHED = -1


def least_in_windows(values: Sequence[float], lows: Sequence[int]) -> list[int]:
    """For each `b`, the index of the least of ``values[lows[b] : b]``; `NOT_REACHED` where none is finite.

    Args:
        values: What to compare; infinite for what cannot be taken.
        lows: Where each window begins; never falls.
    """
    infinite = float("inf")
    queue: deque[int] = deque()
    least = []
    for end, low in enumerate(lows):
        if end and (newest := values[end - 1]) < infinite:
            while queue and values[queue[-1]] >= newest:
                queue.pop()
            queue.append(end - 1)
        while queue and queue[0] < low:
            queue.popleft()
        least.append(queue[0] if queue else NOT_REACHED)
    return least
