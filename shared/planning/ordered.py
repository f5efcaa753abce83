"""Search for pieces of unlike size on many nodes: exact for one order of nodes, over a bounded number of orders.

For a given order, `OrderSearch` finds the best choice of nodes and segments in O(nodes x cuts). Which order is best is
the hard part. Some natural ones are tried; where none reaches the end, or for a slower stage than need be, two nodes
are swapped again and again (`_climb`); for less time per token, used nodes are swapped and moved. All of it is bounded
by counts, not by a clock, so the same fleet gets the same plan. How far the result can be from the best is what
`shared.planning.bounds` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from random import Random
from typing import Final

from shared.planning.bisection import least_feasible
from shared.planning.chain import FIRST, MIDDLE, Chain, Placed, Placement, latency_of
from shared.planning.rows import NOWHERE, Extension, Row, extension

ORDER_STEPS_MAX: Final = 35_000
"""Nodes x cuts x orders tried: some 25 ms on one core."""
ORDERS_MIN: Final = 4
"""The natural orders are tried whatever they cost."""
CLIMB_STEPS_MAX: Final = 8_000
"""Nodes x swaps of one climb: some 15 ms on one core."""
CLIMB_SEED: Final = 0
"""Any number; the same each time, so that a plan can be had again."""
LIMIT_STEP: Final = 0.01
"""An order that makes the slowest stage less than 1 % faster is not looked for."""

_Order = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OrderSearch:
    """Exact among routes that pass the nodes in this order, leaving out any."""

    chain: Chain
    order: _Order

    def feasible(self, busy_max_s: float) -> bool:
        """Whether some route has no stage slower than the limit; reaching further is never worse."""
        last = self.chain.num_segments
        is_alone = any(self.chain.is_allowed(node, 0, last, busy_max_s) for node in self.order)
        return is_alone or self.reach(busy_max_s) == last

    def reach(self, busy_max_s: float) -> int:
        """The furthest cut that a route with no stage slower than the limit gets to."""
        reached = 0
        for node in self.order:
            reached = self.chain.furthest(node, reached, busy_max_s)
        return reached

    def fastest(self, extensions: list[Extension], required: int | None = None) -> Placement | None:
        """The route of least time per token; None when there is none.

        Args:
            extensions: For each node of the chain, under the limit that holds.
            required: Index of a node that must be on it.
        """
        row: Row = [0.0, *[NOWHERE] * self.chain.num_segments]
        trail: list[dict[int, int]] = []
        for node in self.order:
            costs, starts = extensions[node].extend(row)
            if node == required:
                row = [NOWHERE] * len(row)
            better = {end: starts[end] for end, cost in enumerate(costs) if cost < row[end]}
            row = [min(pair) for pair in zip(row, costs, strict=True)]
            trail.append(better)
        return None if row[-1] == NOWHERE else self._read_back(trail)

    def _read_back(self, trail: list[dict[int, int]]) -> Placement:
        placed: list[Placed] = []
        end = self.chain.num_segments
        for node, better in zip(reversed(self.order), reversed(trail), strict=True):
            if end in better:
                placed.append(Placed(node, better[end], end))
                end = better[end]
        return tuple(reversed(placed))


@dataclass(slots=True)
class OrderedSearch:
    """Near the best for any chain, in bounded time. Remembers orders that were found to keep a limit."""

    chain: Chain
    _kept: list[_Order] = field(default_factory=list)

    def least_limit(self, known_s: float) -> float:
        """The least slowest stage that was found, given that of some route."""
        best_s, best_order = known_s, next(_natural_orders(self.chain))
        for order in _natural_orders(self.chain):
            if OrderSearch(self.chain, order).feasible(best_s * (1 - LIMIT_STEP)):
                best_s, best_order = least_feasible(OrderSearch(self.chain, order).feasible, best_s), order
        random = Random(CLIMB_SEED)  # noqa: S311 - a search, no secret
        while (climbed := self._climb(best_order, best_s * (1 - LIMIT_STEP), random)) is not None:
            best_order = climbed
            best_s = least_feasible(OrderSearch(self.chain, best_order).feasible, best_s * (1 - LIMIT_STEP))
        self._kept.append(best_order)
        return best_s

    def fastest(self, busy_max_s: float = NOWHERE, required: int | None = None) -> Placement | None:
        """The route of least time per token that was found; None when none was.

        Args:
            busy_max_s: No stage may take longer.
            required: Index of a node that must be on it.
        """
        extensions = [extension(self.chain, node, busy_max_s) for node in range(len(self.chain.nodes))]
        best: Placement | None = None
        best_order, best_s = next(_natural_orders(self.chain)), NOWHERE
        budget = max(ORDERS_MIN, ORDER_STEPS_MAX // (len(self.chain.nodes) * len(self.chain.cuts)))
        orders = self._starting_orders(busy_max_s)
        while orders and budget > 0:
            improved = False
            for order in orders[:budget]:
                budget -= 1
                found = OrderSearch(self.chain, order).fastest(extensions, required)
                if found is not None and latency_of(self.chain, found) < best_s:
                    best, best_order, best_s = found, order, latency_of(self.chain, found)
                    improved = True
            orders = list(_neighbours(best_order, best)) if improved and best else []
        return best

    def _starting_orders(self, busy_max_s: float) -> list[_Order]:
        orders = [*reversed(self._kept), *_natural_orders(self.chain)]
        able = [order for order in orders if OrderSearch(self.chain, order).feasible(busy_max_s)]
        if able:
            return able
        climbed = self._climb(orders[0], busy_max_s, Random(CLIMB_SEED))  # noqa: S311 - as above
        return [] if climbed is None else [climbed]

    def _climb(self, order: _Order, busy_max_s: float, random: Random) -> _Order | None:
        """Swap nodes until the order reaches the end under the limit; None when it does not within the bound."""
        reached = OrderSearch(self.chain, order).reach(busy_max_s)
        for _ in range(CLIMB_STEPS_MAX // len(order)):
            if reached == self.chain.num_segments:
                return order
            swapped = _swapped(order, random.randrange(len(order)), random.randrange(len(order)))
            now = OrderSearch(self.chain, swapped).reach(busy_max_s)
            if now >= reached:
                order, reached = swapped, now
        return None


def _natural_orders(chain: Chain) -> Iterator[_Order]:
    """Cheap work first, with and without the hop's own time spread over what the node holds; roomy first and last."""
    nodes = range(len(chain.nodes))

    def spread_s(node: int) -> float:
        terms = chain.nodes[node]
        share = min(1.0, max(terms.room_bytes[MIDDLE], 1) / (terms.bytes_before[-1] or 1))
        return terms.per_work_s + terms.fixed_s[MIDDLE] / (share * chain.work_before[-1])

    yield tuple(sorted(nodes, key=spread_s))
    yield tuple(sorted(nodes, key=lambda node: chain.nodes[node].per_work_s))
    yield tuple(sorted(nodes, key=lambda node: -chain.nodes[node].room_bytes[FIRST]))
    yield tuple(sorted(nodes, key=lambda node: chain.nodes[node].room_bytes[FIRST]))


def _neighbours(order: _Order, placement: Placement) -> Iterator[_Order]:
    """Orders that differ by a used node at another place: at either end, or swapped with another used one."""
    used = [item.node for item in placement]
    for node in used:
        others = tuple(other for other in order if other != node)
        yield (node, *others)
        yield (*others, node)
    for a, b in combinations(used, 2):
        yield _swapped(order, order.index(a), order.index(b))


def _swapped(order: _Order, i: int, j: int) -> _Order:
    changed = list(order)
    changed[i], changed[j] = changed[j], changed[i]
    return tuple(changed)
