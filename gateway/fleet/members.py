"""Live nodes as the fleet's decisions take them: when each joined or was lost, what it was told, what it could not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.fleet.state import FixedNode, Member
from gateway.mesh import Mesh
from gateway.node_link import NodeLink
from shared.clock import Clock
from shared.layers import LayerRange
from shared.messages import MachineInfo, NodeInfo

PACE_STEP = 1.05
"""Paces are told apart by such a factor, so that a plan is not made anew for every step."""
FAILED_S = 60.0
"""How long a range that a node could not load is not asked of it again."""


@dataclass(slots=True)
class _Record:
    """What is remembered of a node beside what its link knows."""

    connects: int = 0
    joined_at: float = 0.0
    lost_at: float | None = None
    loading: LayerRange | None = None
    failed: dict[LayerRange, float] = field(default_factory=dict)
    layer_s: float | None = None
    offered: MachineInfo | None = None


@dataclass(slots=True, kw_only=True)
class Members:
    """Looks at the links of a mesh.

    Args:
        mesh: The nodes.
        model: Fingerprint of the model.
        num_layers: Its decoder layers.
        grace_s: How long a node with a given range counts after it was lost.
        clock: Time.
        work: What a decode step over a range is, in average layers; without it no pace is learned from steps.
        leaving: Nodes that are to go.
        refused_cuts: Boundaries at which nodes have said that the model cannot be cut.
    """

    mesh: Mesh
    model: str
    num_layers: int
    grace_s: float
    clock: Clock
    work: Callable[[LayerRange], float] | None = None
    leaving: set[str] = field(default_factory=set)
    refused_cuts: set[int] = field(default_factory=set)
    _records: dict[str, _Record] = field(default_factory=dict)

    def link(self, node: str) -> NodeLink | None:
        """The link to a node: of several the one that is open."""
        links = [link for link in self.mesh.links if link.node == node]
        return next((link for link in links if link.is_open), links[0] if links else None)

    def note_load(self, node: str, layers: LayerRange) -> None:
        """A node was told to hold a range."""
        self._records.setdefault(node, _Record()).loading = layers

    def look(self) -> tuple[tuple[Member, ...], tuple[FixedNode, ...]]:
        """All nodes as they are now: those that take any range, and those whose range is given."""
        nodes = sorted({link.node for link in self.mesh.links if link.node is not None})
        for forgotten in self._records.keys() - nodes:
            del self._records[forgotten]
        members, fixed = [], []
        for node in nodes:
            link = self.link(node)
            assert link is not None  # noqa: S101 - the names are those of links
            record = self._follow(node, link)
            if link.machine is not None:
                members.append(self._member(node, link, link.machine, record))
            elif link.info is not None and self._serves(link.info) and self._away_s(record) < self.grace_s:
                fixed.append(self._fixed(node, link, link.info, record))
        return tuple(members), tuple(fixed)

    def _follow(self, node: str, link: NodeLink) -> _Record:
        record, now_s = self._records.setdefault(node, _Record()), self.clock.monotonic()
        if link.is_open and link.connects != record.connects:
            if record.connects:
                self.leaving.discard(node)  # who comes back means to stay
            record.connects, record.joined_at, record.loading = link.connects, now_s, None
        if link.is_open:
            record.lost_at = None
        elif record.lost_at is None:
            record.lost_at, record.loading = now_s, None
        if link.info is not None:
            self._learn(record, link.info, now_s)
        record.failed = {layers: until_s for layers, until_s in record.failed.items() if until_s > now_s}
        return record

    def _learn(self, record: _Record, info: NodeInfo, now_s: float) -> None:
        self.refused_cuts.update(cut for cut in info.refused_cuts if 0 < cut < self.num_layers)
        if record.loading is None:
            return
        if info.state == "failed" and not self.refused_cuts & {info.layers.start, info.layers.end}:
            record.failed[info.layers] = now_s + FAILED_S
        record.loading = None

    def _learn_pace(self, record: _Record, link: NodeLink, machine: MachineInfo) -> None:
        """Keep what its steps show, whatever range it holds next; another speed of its own says that it is another."""
        if record.offered is None or record.offered.read_bytes_per_s != machine.read_bytes_per_s:
            record.layer_s = None
        record.offered = machine
        compute_s = link.alone.compute_s
        if compute_s is not None and link.info is not None and self._serves(link.info) and self.work is not None:
            record.layer_s = rounded_pace_s(compute_s / self.work(link.info.layers))

    def _member(self, node: str, link: NodeLink, machine: MachineInfo, record: _Record) -> Member:
        self._learn_pace(record, link, machine)
        info = link.info if link.info is not None and self._serves(link.info) else None
        return Member(
            node=node,
            machine=machine,
            rtt_s=link.round_trip_min_s or 0.0,
            bytes_per_s=link.bytes_per_s,
            layer_s=record.layer_s,
            joined_at=record.joined_at,
            away_s=self._away_s(record),
            layers=info.layers if info is not None and info.state != "failed" else None,
            state=info.state if info is not None else None,
            loading=record.loading,
            is_leaving=node in self.leaving or link.drains,
            failed=frozenset(record.failed),
        )

    def _fixed(self, node: str, link: NodeLink, info: NodeInfo, record: _Record) -> FixedNode:
        seen = link.observed.last_minute(self.clock.monotonic())
        return FixedNode(
            node=node,
            layers=info.layers,
            is_leaving=node in self.leaving or link.drains,
            away_s=self._away_s(record),
            is_ready=link.is_open and info.state == "ready",
            precision=info.precision,
            token_s=seen.token_s if seen is not None else link.pace.decode_s,
        )

    def _away_s(self, record: _Record) -> float:
        """At least a moment once it is lost, so that 0 means here."""
        return 0.0 if record.lost_at is None else max(1e-6, self.clock.monotonic() - record.lost_at)

    def _serves(self, info: NodeInfo) -> bool:
        return info.model == self.model and info.num_layers == self.num_layers


def rounded_pace_s(layer_s: float) -> float:
    """A pace as plans take it."""
    return float(PACE_STEP ** round(math.log(layer_s, PACE_STEP)))
