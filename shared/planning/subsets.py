"""Exact search for pieces of any size, where few enough sets of nodes exist: dynamic programming over the sets.

Nodes with equal terms are interchangeable, so a set is a count for each kind of node. Its row is the least time of a
route through exactly these nodes, in whatever order, up to each cut. Finding the best order is NP-hard in general
(it contains bin packing), so the number of sets is bounded by `SUBSET_STEPS_MAX`; beyond it `shared.planning.ordered`
takes over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Final

from shared.planning.bisection import least_feasible
from shared.planning.chain import Chain, NodeTerms, Placed, Placement
from shared.planning.rows import NOWHERE, Row, extension

SUBSET_STEPS_MAX: Final = 50_000
"""Sets x kinds x cuts: some 30 ms on one core."""

_Counts = tuple[int, ...]
_Origins = list[tuple[int, int]]
"""For each cut, the kind of the last node and where its segment starts."""


def subset_steps(chain: Chain) -> int:
    """What a subset search of this chain costs, to be compared with `SUBSET_STEPS_MAX`."""
    kinds = _kinds(chain)
    return prod(len(nodes) + 1 for nodes in kinds) * len(kinds) * len(chain.cuts)


@dataclass(slots=True)
class SubsetSearch:
    """Exact for any chain; costs `subset_steps`."""

    chain: Chain
    _kinds: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._kinds = _kinds(self.chain)

    def least_limit(self, known_s: float) -> float:
        """The least slowest stage of any route, given that of some route."""
        return least_feasible(self.feasible, known_s)

    def feasible(self, busy_max_s: float) -> bool:
        """Whether some route has no stage slower than the limit.

        Reaching further is never worse: what a node can hold from a cut on, it can hold from a later one.
        Only a node that is alone, which gets ids and gives ids, may have a lighter link than when it shares.
        """
        chain, last = self.chain, self.chain.num_segments
        if any(chain.is_allowed(nodes[0], 0, last, busy_max_s) for nodes in self._kinds):
            return True
        reached: dict[_Counts, int] = {}
        for counts in self._sets():
            ends = [
                chain.furthest(self._kinds[kind][0], reached[fewer], busy_max_s) for kind, fewer in _without_one(counts)
            ]
            reached[counts] = max(ends, default=0)
            if reached[counts] == last:
                return True
        return False

    def fastest(self, busy_max_s: float = NOWHERE, required: int | None = None) -> Placement | None:
        """The route of least time per token; None when there is none.

        Args:
            busy_max_s: No stage may take longer.
            required: Index of a node that must be on it.
        """
        extensions = [extension(self.chain, nodes[0], busy_max_s) for nodes in self._kinds]
        rows: dict[_Counts, Row] = {}
        origins: dict[_Counts, _Origins] = {}
        for counts in self._sets():
            row, origin = [NOWHERE] * len(self.chain.cuts), [(0, 0)] * len(self.chain.cuts)
            row[0] = NOWHERE if any(counts) else 0.0
            for kind, fewer in _without_one(counts):
                costs, starts = extensions[kind].extend(rows[fewer])
                for end, cost in enumerate(costs):
                    if cost < row[end]:
                        row[end], origin[end] = cost, (kind, starts[end])
            rows[counts], origins[counts] = row, origin
        return self._best(rows, origins, required)

    def _best(
        self, rows: dict[_Counts, Row], origins: dict[_Counts, _Origins], required: int | None
    ) -> Placement | None:
        last = self.chain.num_segments
        kind = next((kind for kind, nodes in enumerate(self._kinds) if required in nodes), None)
        able = [counts for counts in rows if kind is None or counts[kind]]
        best = min(able, key=lambda counts: rows[counts][last], default=None)
        if best is None or rows[best][last] == NOWHERE:
            return None
        return self._read_back(best, origins, required)

    def _read_back(self, counts: _Counts, origins: dict[_Counts, _Origins], required: int | None) -> Placement:
        unused = [sorted(nodes, key=lambda node: node != required, reverse=True) for nodes in self._kinds]
        placed: list[Placed] = []
        end = self.chain.num_segments
        while end:
            kind, start = origins[counts][end]
            placed.append(Placed(unused[kind].pop(), start, end))
            counts, end = _less(counts, kind), start
        return tuple(reversed(placed))

    def _sets(self) -> Iterator[_Counts]:
        """Every set, each after all of its subsets."""
        return product(*(range(len(nodes) + 1) for nodes in self._kinds))


def _kinds(chain: Chain) -> list[list[int]]:
    """Indices of nodes, those with equal terms together."""
    kinds: dict[NodeTerms, list[int]] = {}
    for index, terms in enumerate(chain.nodes):
        kinds.setdefault(terms, []).append(index)
    return list(kinds.values())


def _less(counts: _Counts, kind: int) -> _Counts:
    return (*counts[:kind], counts[kind] - 1, *counts[kind + 1 :])


def _without_one(counts: _Counts) -> Iterator[tuple[int, _Counts]]:
    return ((kind, _less(counts, kind)) for kind, count in enumerate(counts) if count)
