"""Taking a node out of service while answers go on: others take its place, its sessions move, then it is told to go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from gateway.admission import Admission
from gateway.fleet.members import Members
from gateway.fleet.state import IMPOSSIBLE
from gateway.mesh import Mesh
from gateway.registry import NoRoute, find_route
from gateway.waiting import wait_first
from shared.clock import Clock
from shared.errors import MeshError
from shared.messages import Drain

REPLACED_S_MAX = 300.0
"""How long others may take to load what the node holds, before it stays after all."""
REPLANNED_S_MAX = 5.0
"""How long it may take until it is known whether others can be given what the node holds."""
EMPTIED_S_MAX = 120.0
"""How long its sessions may take to leave; what is left then is recovered as after any loss."""
GONE_S_MAX = 60.0
"""How long the node itself may take to end."""
LOOKED_EVERY_S = 0.25

log = structlog.stdlib.get_logger(__name__)


class DrainRefused(MeshError):
    """A node stays: `unknown_node`, `already_draining`, `no_replacement`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """What came of it.

    Args:
        node: Its id.
        sessions_left: Sessions that had not moved when it was told to go.
        is_gone: Whether its link has closed.
        took_s: From the request to that.
    """

    node: str
    sessions_left: int
    is_gone: bool
    took_s: float


@dataclass(slots=True, kw_only=True)
class Drainer:
    """Takes nodes out of service.

    Args:
        mesh: The nodes.
        members: Where it is noted who is to go, which plans take into account.
        admission: Knows which sessions are where.
        clock: Time.
        pending: Why the plan does not change, in words; empty when it does, or need not.
    """

    mesh: Mesh
    members: Members
    admission: Admission
    clock: Clock
    pending: Callable[[], str] = lambda: ""

    async def drain(self, node: str) -> Drained:
        """Take one node out of service; whoever asks may leave, and it stays in service then unless it was told to go.

        Raises:
            DrainRefused: It is not connected, is leaving already, or nothing can take its place.
        """
        link = self.members.link(node)
        if link is None or not link.is_open:
            raise DrainRefused("unknown_node", f"no node called {node} is connected", node=node)
        if node in self.members.leaving:
            raise DrainRefused("already_draining", f"{node} is being drained already", node=node)
        began_at = self.clock.monotonic()
        self.members.leaving.add(node)
        self.mesh.announce()
        told = False
        try:
            log.info("node.drain_asked", node=node)
            await self._wait(lambda: not link.is_open or self._is_replaced(node), REPLANNED_S_MAX)
            if link.is_open and not self._is_replaced(node) and not self._is_hopeful(node):
                message = f"nothing can take the place of {node}: {self.pending() or 'no other node takes any range'}"
                raise DrainRefused("no_replacement", message, node=node)
            if not await self._wait(lambda: not link.is_open or self._is_replaced(node), REPLACED_S_MAX):
                message = (
                    f"nothing took the place of {node} within {REPLACED_S_MAX:.0f} s; without it {self._missing(node)}"
                )
                raise DrainRefused("no_replacement", message, node=node)
            self.mesh.hold_back(node)
            await self._wait(lambda: not link.is_open or not self.admission.load()[node], EMPTIED_S_MAX)
            sessions_left = self.admission.load()[node]
            if link.is_open:
                link.direct(Drain())
            told = True
            is_gone = await self._wait(lambda: not link.is_open, GONE_S_MAX)
        finally:
            if not told:
                self.members.leaving.discard(node)
            self.mesh.release(node)
        took_s = self.clock.monotonic() - began_at
        log.info("node.drained", node=node, sessions_left=sessions_left, is_gone=is_gone, took_s=round(took_s, 1))
        return Drained(node=node, sessions_left=sessions_left, is_gone=is_gone, took_s=took_s)

    def _is_hopeful(self, node: str) -> bool:
        """Whether some other node could be given what this one holds, or loads it already."""
        others = [link for link in self.mesh.links if link.is_open and link.machine is not None and link.node != node]
        return bool(others) and IMPOSSIBLE not in self.pending()

    def _is_replaced(self, node: str) -> bool:
        return self._missing(node) is None

    def _missing(self, node: str) -> str | None:
        """Why the mesh cannot do without a node; None when it can."""
        others = [info for info in self.mesh.nodes() if info.node != node]
        route = find_route(others, model=self.admission.model, num_layers=self.admission.num_layers)
        return route.reason if isinstance(route, NoRoute) else None

    async def _wait(self, condition: Callable[[], bool], limit_s: float) -> bool:
        ends_at = self.clock.monotonic() + limit_s
        while not condition():
            left_s = ends_at - self.clock.monotonic()
            if left_s <= 0:
                return False
            changed = self.mesh.changed
            await wait_first(self.clock, min(left_s, LOOKED_EVERY_S), changed.wait())
        return True
