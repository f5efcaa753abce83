"""The planning problem as bare numbers: positions where the model may be cut, and what each node makes of a segment.

A segment of the chain is given by two indices into `cuts`. What it costs a node is a constant of its role (whether it
is first, last or both) plus a slope times the segment's work, and it fits if its bytes do. Every search in this package
rests on two consequences: a part of what fits fits, and a part of it costs no more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MIDDLE, FIRST, LAST, ONLY = range(4)
"""Roles of a node on the route: bit 0 says that it is first, bit 1 that it is last."""
RELATIVE_SLACK: Final = 1e-9
"""Costs that differ by less are the same: sums of the same figures in another order."""


def role_of(*, is_first: bool, is_last: bool) -> int:
    """The role of a node that holds the first segment, the last, both or neither."""
    return FIRST * is_first + LAST * is_last


@dataclass(frozen=True, slots=True)
class NodeTerms:
    """What a node makes of a segment; the tuples are indexed by role.

    Args:
        room_bytes: What it has for layers, once the ends that come with the role are in.
        fixed_s: Time per token whatever the segment.
        per_work_s: Time per token and unit of work.
        busy_fixed_s: The part of `fixed_s` during which it can serve nothing else.
        wire_s: How long its link is busy with a token, which may be longer than it computes.
        bytes_before: For each cut of the chain, the bytes of all layers before it as this node holds them.
        precision: How it rounds; a copy of a range stands in only for one of the same.
    """

    room_bytes: tuple[int, int, int, int]
    fixed_s: tuple[float, float, float, float]
    per_work_s: float
    busy_fixed_s: tuple[float, float, float, float]
    wire_s: tuple[float, float, float, float]
    bytes_before: tuple[int, ...]
    precision: str

    def latency_s(self, role: int, work: float) -> float:
        """Time that a token spends on this hop."""
        return self.fixed_s[role] + self.per_work_s * work

    def bytes_of(self, start: int, end: int) -> int:
        """Bytes of a segment."""
        return self.bytes_before[end] - self.bytes_before[start]

    def busy_s(self, role: int, work: float) -> float:
        """How long a token keeps the stage from the next one."""
        return max(self.busy_fixed_s[role] + self.per_work_s * work, self.wire_s[role])

    def work_max(self, role: int, busy_max_s: float) -> float:
        """The most work that keeps `busy_s` within a limit; below 0 when none does."""
        if self.wire_s[role] > busy_max_s:
            return -1.0
        return (busy_max_s - self.busy_fixed_s[role]) / self.per_work_s


@dataclass(frozen=True, slots=True)
class Chain:
    """The whole problem.

    Args:
        cuts: Layer boundaries at which ranges may end, ascending, from 0 to the number of layers.
        work_before: For each cut, their work; the average layer is 1.
        nodes: Every machine.
    """

    cuts: tuple[int, ...]
    work_before: tuple[float, ...]
    nodes: tuple[NodeTerms, ...]

    @property
    def num_segments(self) -> int:
        """Pieces between neighbouring cuts."""
        return len(self.cuts) - 1

    @property
    def is_uniform(self) -> bool:
        """Whether all pieces are alike, so that the order of nodes between the ends does not matter."""
        work, sizes = self.work_before[1], {node.bytes_before for node in self.nodes}
        return all(abs(value - work * i) <= RELATIVE_SLACK * value for i, value in enumerate(self.work_before)) and all(
            value == before[1] * i for before in sizes for i, value in enumerate(before)
        )

    def work(self, start: int, end: int) -> float:
        """Work of a segment."""
        return self.work_before[end] - self.work_before[start]

    def role(self, start: int, end: int) -> int:
        """The role of the node that holds a segment."""
        return (FIRST if start == 0 else MIDDLE) | (LAST if end == len(self.cuts) - 1 else MIDDLE)

    def fits(self, node: int, start: int, end: int) -> bool:
        """Whether the node has the memory for a segment."""
        return self.nodes[node].bytes_of(start, end) <= self.nodes[node].room_bytes[self.role(start, end)]

    def latency_s(self, node: int, start: int, end: int) -> float:
        """Time that a token spends on the node for a segment."""
        return self.nodes[node].latency_s(self.role(start, end), self.work(start, end))

    def busy_s(self, node: int, start: int, end: int) -> float:
        """How long a token occupies the node for a segment."""
        return self.nodes[node].busy_s(self.role(start, end), self.work(start, end))

    def is_allowed(self, node: int, start: int, end: int, busy_max_s: float) -> bool:
        """Whether a segment fits and keeps within the limit on a stage's time."""
        role, terms = self.role(start, end), self.nodes[node]
        return terms.bytes_of(start, end) <= terms.room_bytes[role] and self.work(start, end) <= terms.work_max(
            role, busy_max_s
        )

    def furthest(self, node: int, start: int, busy_max_s: float) -> int:
        """The furthest end that the node reaches from `start`; `start` itself where it can hold nothing."""
        last = self.num_segments
        if self.is_allowed(node, start, last, busy_max_s):
            return last
        role, terms = role_of(is_first=start == 0, is_last=False), self.nodes[node]
        by_bytes = bisect_right(terms.bytes_before, terms.bytes_before[start] + terms.room_bytes[role])
        by_work = bisect_right(self.work_before, self.work_before[start] + terms.work_max(role, busy_max_s))
        return max(start, min(by_bytes - 1, by_work - 1, last - 1))


@dataclass(frozen=True, slots=True)
class Placed:
    """One node's segment, by indices into the chain's nodes and cuts."""

    node: int
    start: int
    end: int


Placement = tuple[Placed, ...]
"""Segments in the order of the route."""


def latency_of(chain: Chain, placement: Placement) -> float:
    """Time that a token takes over the whole route."""
    return sum(chain.latency_s(item.node, item.start, item.end) for item in placement)


def bottleneck_of(chain: Chain, placement: Placement) -> float:
    """Time of the slowest stage."""
    return max(chain.busy_s(item.node, item.start, item.end) for item in placement)


def in_order(sizes: Sequence[tuple[int, int]]) -> Placement:
    """Segments one after the other: (node, number of pieces) in the order of the route."""
    placed, start = [], 0
    for node, size in sizes:
        placed.append(Placed(node, start, start + size))
        start += size
    return tuple(placed)
