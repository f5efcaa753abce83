"""Exact search where all pieces are alike: only how many each node holds matters, and who is first and last.

`fastest` is a knapsack over nodes: the state is how many pieces are held and which ends are taken (bits `FIRST` and
`LAST`), and a node enters it in one role with any number of pieces that it may hold. Every choice of nodes, roles and
numbers is met, so the result is optimal; O(nodes x pieces).
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.planning.bisection import least_feasible
from shared.planning.chain import FIRST, LAST, MIDDLE, ONLY, Chain, Placement, in_order
from shared.planning.sliding import NOT_REACHED, least_in_windows

_NOWHERE = float("inf")
_BOTH = FIRST | LAST
_Costs = list[list[float]]
"""Least time by ends taken and pieces held."""
_Origin = tuple[int, int]
"""Role in which a node entered a state, and the pieces held before."""
_Taking = tuple[int, int, int]
"""A node, its role, and the most pieces it may take."""
_Origins = list[dict[int, _Origin]]
"""By ends taken: pieces held → how; what is missing was held before the node came."""


@dataclass(frozen=True, slots=True)
class UniformSearch:
    """Exact for a chain that `is_uniform`."""

    chain: Chain

    def least_limit(self, known_s: float) -> float:
        """The least slowest stage of any route, given that of some route."""
        return least_feasible(self.feasible, known_s)

    def feasible(self, busy_max_s: float) -> bool:
        """Whether some route has no stage slower than the limit."""
        total = self.chain.num_segments
        held = [[self._pieces_max(node, role, busy_max_s) for role in range(4)] for node in range(len(self._nodes))]
        if any(pieces[ONLY] >= total for pieces in held):
            return True
        ends = _best_ends(held)
        return ends is not None and total >= 2 and sum(pieces[MIDDLE] for pieces in held) + ends >= total

    def fastest(self, busy_max_s: float = _NOWHERE, required: int | None = None) -> Placement | None:
        """The route of least time per token; None when there is none.

        Args:
            busy_max_s: No stage may take longer.
            required: Index of a node that must be on it.
        """
        total = self.chain.num_segments
        costs: _Costs = [[_NOWHERE] * (total + 1) for _ in range(4)]
        costs[MIDDLE][0] = 0.0
        trail: list[_Origins] = []
        for node in range(len(self._nodes)):
            costs, origins = self._with_node(node, costs, busy_max_s, must=node == required)
            trail.append(origins)
        shared = costs[_BOTH][total]
        alone = self._fastest_alone(busy_max_s, required)
        if alone is not None and self.chain.latency_s(alone, 0, total) <= shared:
            return in_order([(alone, total)])
        return None if shared == _NOWHERE else self._read_back(trail)

    @property
    def _nodes(self) -> range:
        return range(len(self.chain.nodes))

    def _pieces_max(self, node: int, role: int, busy_max_s: float) -> int:
        """How many pieces a node may hold in a role."""
        terms, work = self.chain.nodes[node], self.chain.work_before[1]
        room, work_max = terms.room_bytes[role], terms.work_max(role, busy_max_s)
        if room < 0 or work_max < 0:
            return 0
        by_bytes = room // terms.bytes_before[1] if terms.bytes_before[1] else self.chain.num_segments
        by_work = work_max / work if work else _NOWHERE
        return int(min(self.chain.num_segments, by_bytes, by_work))

    def _fastest_alone(self, busy_max_s: float, required: int | None) -> int | None:
        total = self.chain.num_segments
        able = [
            node
            for node in self._nodes
            if required in (None, node) and self._pieces_max(node, ONLY, busy_max_s) >= total
        ]
        return min(able, key=lambda node: self.chain.latency_s(node, 0, total), default=None)

    def _with_node(self, node: int, costs: _Costs, busy_max_s: float, *, must: bool) -> tuple[_Costs, _Origins]:
        """Let one more node enter each state in each role that is free."""
        entered = [[_NOWHERE] * len(row) for row in costs] if must else [list(row) for row in costs]
        origins: _Origins = [{} for _ in range(4)]
        for role in (MIDDLE, FIRST, LAST):
            most = self._pieces_max(node, role, busy_max_s)
            for ends in range(4) if most else ():
                if not ends & role and min(costs[ends]) < _NOWHERE:
                    target = ends | role
                    self._enter((node, role, most), costs[ends], entered[target], origins[target])
        return entered, origins

    def _enter(self, taking: _Taking, held: list[float], entered: list[float], origins: dict[int, _Origin]) -> None:
        """Let a node take pieces in a role, wherever that is better than what `entered` has."""
        node, role, most = taking
        terms, work = self.chain.nodes[node], self.chain.work_before[1]
        slope, fixed = terms.per_work_s * work, terms.fixed_s[role]
        relative = [cost - slope * count for count, cost in enumerate(held)]
        lows = [max(0, count - most) for count in range(len(held))]
        for count, before in enumerate(least_in_windows(relative, lows)):
            if before == NOT_REACHED:
                continue
            cost = relative[before] + fixed + slope * count
            if cost < entered[count]:
                entered[count] = cost
                origins[count] = (role, before)

    def _read_back(self, trail: list[_Origins]) -> Placement:
        """The route behind the best final state: first node, those between, last node."""
        ends, count = _BOTH, self.chain.num_segments
        by_role: dict[int, list[tuple[int, int]]] = {FIRST: [], MIDDLE: [], LAST: []}
        for node in reversed(self._nodes):
            origin = trail[node][ends].get(count)
            if origin is not None:
                role, before = origin
                by_role[role].append((node, count - before))
                ends, count = ends & ~role, before
        return in_order([*by_role[FIRST], *reversed(by_role[MIDDLE]), *by_role[LAST]])


def _best_ends(held: list[list[int]]) -> int | None:
    """How many pieces more (or fewer) are held in all when the two best nodes for it are first and last."""
    firsts = sorted(((pieces[FIRST] - pieces[MIDDLE], i) for i, pieces in enumerate(held) if pieces[FIRST]))[-2:]
    lasts = sorted(((pieces[LAST] - pieces[MIDDLE], i) for i, pieces in enumerate(held) if pieces[LAST]))[-2:]
    pairs = [first + last for first, i in firsts for last, j in lasts if i != j]
    return max(pairs, default=None)
