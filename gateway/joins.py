"""Nodes that dial the gateway: their handshake, whose id is whose, and how long one that has gone is remembered.

A node that has joined stays known when its link ends, so that what waits for it goes on waiting and ``GET /mesh`` shows
it as away; when it comes back under the same id it is itself again. After `AWAY_S` it is forgotten.
"""

from __future__ import annotations

from functools import partial

import structlog

from gateway.join_rules import Holder, may_replace
from gateway.mesh import Mesh
from gateway.node_link import NodeLink
from gateway.open_link import JoinedLink
from shared.clock import Clock
from shared.errors import LinkClosed
from shared.handshake import choose_version
from shared.link import CLOSE_REFUSED, HANDSHAKE_TIMEOUT_S, Link, Transport, accept
from shared.mesh_access import MeshAccess
from shared.messages import Hello, Refused, Welcome
from shared.version import SOFTWARE

AWAY_S = 600.0
"""A node that has been gone for so long is not the one that would come back."""
AWAY_CHECKED_EVERY_S = 10.0
JOINED_MAX = 512
"""Nodes known at once, those that are away included: as many as can be planned for."""

log = structlog.stdlib.get_logger(__name__)


class Joins:
    """Accepts nodes. `run` forgets those that are away for too long.

    Args:
        mesh: Where they become known.
        gateway_id: What this gateway calls itself.
        model: Fingerprint of the model that it serves.
        access: Tokens and TLS: what nodes must show.
        clock: Time.
        handshake_s: How long a node may take to say who it is.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        gateway_id: str,
        model: str | None,
        access: MeshAccess,
        clock: Clock,
        handshake_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._mesh = mesh
        self._gateway_id = gateway_id
        self._model = model
        self._access = access
        self._clock = clock
        self._handshake_s = handshake_s
        self._hosts: dict[NodeLink, str] = {}
        self._connected_at: dict[NodeLink, float] = {}
        self._away_since: dict[NodeLink, float] = {}

    def away_s(self, link: NodeLink) -> float:
        """How long a node that has joined has been gone; 0 while it is here."""
        since = self._away_since.get(link)
        return 0.0 if since is None else self._clock.monotonic() - since

    async def welcome(self, transport: Transport, host: str, *, has_certificate: bool) -> tuple[Link, str]:
        """Shake hands with a node that has dialled; gives its link, for `serve`, and where it came from.

        Args:
            transport: Its connection.
            host: Where it comes from.
            has_certificate: Whether it has shown one of those that are asked for.

        Raises:
            MeshError: It is refused, or says nothing, or something else.
        """
        answer = partial(self._answer, host=host, has_certificate=has_certificate)
        link = await accept(transport, answer=answer, timeout_s=self._handshake_s)
        return link, host

    async def serve(self, link: JoinedLink, host: str) -> None:
        """Serve a node until its link ends.

        Raises:
            LinkClosed: `duplicate_node`: another one of the same id came in between.
        """
        if refusal := self._refusal_of_id(link.hello, host):
            await link.close(CLOSE_REFUSED, refusal.code)
            raise LinkClosed(refusal.code, refusal.message, node=link.peer)
        node = self._known(link.peer)
        if node is not None and node.is_open:
            await node.oust(LinkClosed("replaced", f"{link.peer} has joined again from {host}", node=link.peer))
        if node is None or node.is_open:
            node = NodeLink(f"{host} (joined)", clock=self._clock, on_change=self._mesh.note_change, joined=True)
            self._mesh.add(node)
        self._hosts[node] = host
        self._connected_at[node] = self._clock.monotonic()
        self._away_since.pop(node, None)
        try:
            await node.serve(link)
        finally:
            if not node.is_open:
                self._away_since[node] = self._clock.monotonic()

    async def run(self) -> None:
        """Forget who has been away for too long, until cancelled."""
        while True:
            await self._clock.sleep(AWAY_CHECKED_EVERY_S)
            for link in [link for link in self._away_since if self.away_s(link) >= AWAY_S]:
                self.forget(link)

    def forget(self, link: NodeLink) -> None:
        """Know this node no longer; it is not connected."""
        for table in (self._hosts, self._connected_at, self._away_since):
            table.pop(link, None)
        self._mesh.forget(link)
        log.info("node.forgotten", node=link.node)

    def _known(self, node: str) -> NodeLink | None:
        return next((link for link in self._hosts if link.node == node), None)

    def _answer(self, hello: Hello, *, host: str, has_certificate: bool) -> Welcome | Refused:
        refusal = (
            self._access.check(hello, has_certificate=has_certificate, model=self._model)
            or _refusal_of_role(hello)
            or self._refusal_of_id(hello, host)
        )
        if refusal is not None:
            return refusal
        version = choose_version(hello.versions)
        assert version is not None  # noqa: S101 - `check` has seen to it
        return Welcome(version=version, peer=self._gateway_id, software=SOFTWARE)

    def _refusal_of_id(self, hello: Hello, host: str) -> Refused | None:
        newcomer = Holder(host=host, pid=hello.node.pid if hello.node else 0)
        for link in self._mesh.links:
            if link.node == hello.peer and link.is_open and not may_replace(self._holder(link), newcomer):
                message = f"a node that calls itself {hello.peer} is connected from {link.url}"
                return Refused(code="duplicate_node", message=message)
        if self._known(hello.peer) is None and len(self._hosts) >= JOINED_MAX:
            return Refused(code="too_many_nodes", message=f"the limit is {JOINED_MAX} nodes")
        return None

    def _holder(self, link: NodeLink) -> Holder:
        return Holder(
            host=self._hosts.get(link, ""),
            pid=link.pid,
            dialled=not link.joined,
            quiet_s=link.quiet_s,
            held_s=self._clock.monotonic() - self._connected_at.get(link, 0.0),
        )


def _refusal_of_role(hello: Hello) -> Refused | None:
    """What is no node, or not one that can be used."""
    if hello.role != "node":
        return Refused(code="wrong_role", message=f"only nodes join a gateway, not a {hello.role}")
    if hello.node is None and hello.machine is None:
        return Refused(code="nothing_offered", message="a node that joins names its range or its machine")
    if hello.node is not None and hello.node.node != hello.peer:
        return Refused(code="id_mismatch", message=f"{hello.peer} describes a node called {hello.node.node}")
    return None
