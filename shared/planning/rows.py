"""One node's extensions of all routes, for pieces of any size: what the ordered and the subset search share.

A row holds, for each cut, the least time of a route that ends there.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.planning.chain import FIRST, LAST, MIDDLE, ONLY, Chain, NodeTerms
from shared.planning.sliding import NOT_REACHED, least_in_windows

NOWHERE = float("inf")
Row = list[float]


@dataclass(frozen=True, slots=True)
class Extension:
    """How a node may extend routes under a limit on a stage's time.

    Args:
        chain: The problem.
        terms: The node.
        lows: For each end that is not the last, the first start from which the node reaches it as a middle one.
        first_end: The furthest end that it reaches from the beginning, short of the last.
        last_start: The first start after the beginning from which it reaches the last end; None for none.
        is_alone: Whether it can hold the whole chain.
    """

    chain: Chain
    terms: NodeTerms
    lows: list[int]
    first_end: int
    last_start: int | None
    is_alone: bool

    def extend(self, row: Row) -> tuple[Row, list[int]]:
        """Routes with this node added: for each cut their least time, and where the node's segment starts."""
        work, slope, last = self.chain.work_before, self.terms.per_work_s, self.chain.num_segments
        relative = [cost - slope * done for cost, done in zip(row, work, strict=True)]
        starts = least_in_windows([NOWHERE, *relative[1:]], self.lows)
        starts[last] = self._best_last_start(relative)
        fixed = self.terms.fixed_s
        costs = [
            NOWHERE if a == NOT_REACHED else relative[a] + fixed[LAST if b == last else MIDDLE] + slope * work[b]
            for b, a in enumerate(starts)
        ]
        self._begin(row[0], costs, starts)
        return costs, starts

    def _best_last_start(self, relative: Row) -> int:
        if self.last_start is None:
            return NOT_REACHED
        candidates = range(max(1, self.last_start), self.chain.num_segments)
        best = min(candidates, key=lambda start: relative[start], default=NOT_REACHED)
        return best if best != NOT_REACHED and relative[best] < NOWHERE else NOT_REACHED

    def _begin(self, empty_cost: float, costs: Row, starts: list[int]) -> None:
        """Routes that begin with this node."""
        if empty_cost == NOWHERE:
            return
        work, slope, last = self.chain.work_before, self.terms.per_work_s, self.chain.num_segments
        ends = [(end, FIRST) for end in range(1, self.first_end + 1)]
        for end, role in [*ends, *([(last, ONLY)] if self.is_alone else [])]:
            cost = empty_cost + self.terms.fixed_s[role] + slope * work[end]
            if cost < costs[end]:
                costs[end], starts[end] = cost, 0


def extension(chain: Chain, node: int, busy_max_s: float) -> Extension:
    """Work out how a node may extend routes."""
    last, terms = chain.num_segments, chain.nodes[node]
    lows, low = [], 1
    for end in range(last + 1):
        while low < end and not (end < last and chain.is_allowed(node, low, end, busy_max_s)):
            low += 1
        lows.append(low)
    first_end = min(chain.furthest(node, 0, busy_max_s), last - 1)
    while first_end and not chain.is_allowed(node, 0, first_end, busy_max_s):
        first_end -= 1
    reaching = [start for start in range(1, last) if chain.is_allowed(node, start, last, busy_max_s)]
    is_alone = chain.is_allowed(node, 0, last, busy_max_s)
    return Extension(chain, terms, lows, first_end, min(reaching, default=None), is_alone)
