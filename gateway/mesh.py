"""All nodes, those that are dialled and those that have joined, by the id that each says it has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import structlog

from gateway.dialler import Dialler
from gateway.node_link import NodeLink
from gateway.open_link import Dial
from shared.backoff import Backoff
from shared.clock import Clock, SystemClock
from shared.errors import HandshakeRefused
from shared.handshake import VERSIONS
from shared.layers import LayerRange
from shared.link import dial
from shared.messages import Cancel, Fork, Hello, NodeInfo, Release
from shared.version import SOFTWARE

REDIAL_FIRST_S = 0.05
REDIAL_MAX_S = 2.0
"""A node that comes back is found within this long, at the price of one refused connection every so often."""

log = structlog.stdlib.get_logger(__name__)


class Mesh:
    """Knows every node. Made by `create_mesh`; `run` keeps the dialled links up until it is cancelled.

    Two addresses may lead to nodes of the same id. Then the one configured first is used as long as it
    is connected, and the other is left alone; one that is dialled goes before one that has joined.
    """

    def __init__(self) -> None:
        self.links: list[NodeLink] = []
        self.held_back: set[str] = set()
        self.plan_pending = ""
        self.demand: Callable[[str], tuple[int, int]] = lambda _: (0, 0)
        self._diallers: list[Dialler] = []
        self._open: dict[str, NodeLink] = {}
        self._leaving: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    def add(self, link: NodeLink, dialler: Dialler | None = None) -> None:
        """Know one more node; one that is to be dialled before `run`."""
        self.links.append(link)
        link.demand = lambda: self.demand(link.node or "")
        if dialler is not None:
            self._diallers.append(dialler)

    def forget(self, link: NodeLink) -> None:
        """A node that has been away for too long."""
        self.links.remove(link)
        self.note_change()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this whenever a node's description or reachability has changed. It must not raise."""
        self._listeners.append(listener)

    def note_change(self) -> None:
        """Called by links when their node's description or reachability has changed."""
        self._open = {}
        for link in self.links:
            if link.is_open and link.info is not None and self._open.setdefault(link.info.node, link) is not link:
                log.warning("node.duplicated", node=link.info.node, url=link.url)
        draining = {node for node, link in self._open.items() if link.drains}
        self._leaving = frozenset(self.held_back | draining)
        self.announce()

    def hold_back(self, node: str) -> None:
        """Give this node no new sessions: it is about to leave, and others can do without it."""
        self.held_back.add(node)
        self.note_change()

    def release(self, node: str) -> None:
        """A node that was held back has left, or stays after all."""
        self.held_back.discard(node)
        self.note_change()

    def announce(self) -> None:
        """Wake those who wait for a change, and call the listeners."""
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener()

    @property
    def changed(self) -> asyncio.Event:
        """Set by the next change; take it before looking, so that no change is missed."""
        return self._changed

    def nodes(self) -> list[NodeInfo]:
        """What the connected nodes say of themselves; one that is held back counts as draining."""
        infos = [link.info for link in self._open.values() if link.info is not None]
        if not self.held_back:
            return infos
        return [replace(info, state="draining") if info.node in self.held_back else info for info in infos]

    def is_leaving(self, node: str) -> bool:
        """Whether sessions should move away from a node while it still serves them."""
        return node in self._leaving

    def serves_otherwise(self, node: str, layers: LayerRange) -> bool:
        """Whether a node is connected and is known not to hold this range: it is not going to have it soon."""
        return any(
            link.is_open and link.node == node and (link.info is None or link.info.layers != layers)
            for link in self.links
        )

    def link(self, node: str) -> NodeLink | None:
        """The open link to a node."""
        return self._open.get(node)

    def granted(self, node: str) -> int | None:
        """How many sessions a node lets this gateway have there; None where it has not said."""
        link = self.link(node)
        return link.granted if link is not None else None

    def is_used(self, link: NodeLink) -> bool:
        """False for a link that is down, or whose node's id another link has."""
        return link.info is not None and self._open.get(link.info.node) is link

    def post(self, node: str, message: Release | Cancel) -> None:
        """Send without waiting, as `NodeLink.post` does, to every process that has had this id.

        Two may have it, one after the other or by mistake, and each may hold the session. A node never heard
        of is left alone.
        """
        for link in self.links:
            if link.node == node:
                link.post(message)

    def fork(self, node: str, message: Fork) -> None:
        """Send without waiting to a node that is connected; another has nothing to copy."""
        link = self.link(node)
        if link is not None:
            link.post(message)

    def refusals(self) -> list[str]:
        """Which nodes are there and will not have us, or we them, in words for people."""
        return [
            f"{link.name} refused the link: {link.last_error.code} ({link.last_error.message})"
            for link in self.links
            if not link.is_open and isinstance(link.last_error, HandshakeRefused)
        ]

    def idle(self) -> list[str]:
        """Which nodes are connected and hold no layers, in words for people, and why if the plan says."""
        idle = [
            f"{link.node} {'is loading' if link.load_progress is not None else 'waits for layers'}"
            for link in self.links
            if link.is_open and link.info is None
        ]
        return [*idle, self.plan_pending] if idle and self.plan_pending else idle

    def absences(self) -> list[str]:
        """Which nodes were there and are away, since when and why, in words for people."""
        return [
            f"{link.info.node} ({link.info.layers}) has been away for {away_s:.0f} s: "
            f"{link.last_error.code if link.last_error else 'unknown'}"
            for link in self.links
            if link.info is not None and (away_s := link.away_s()) is not None
        ]

    async def run(self) -> None:
        """Keep the dialled links up until cancelled, and close them then."""
        async with asyncio.TaskGroup() as tasks:
            for dialler in self._diallers:
                tasks.create_task(dialler.run())
            await asyncio.Event().wait()


def create_mesh(
    urls: Sequence[str],
    *,
    gateway_id: str,
    model: str | None,
    token: str | None = None,
    dial: Dial = dial,
    clock: Clock | None = None,
    rng: Random | None = None,
) -> Mesh:
    """A mesh of the nodes that listen at these addresses. Needs a running event loop.

    Args:
        urls: ``ws://`` or ``wss://`` addresses.
        gateway_id: What this gateway calls itself.
        model: Fingerprint that nodes must serve; None accepts any.
        token: The mesh token, unless `dial` sees to that.
        dial: Opens a link; tests give their own.
        clock: Time.
        rng: For the jitter between attempts.
    """
    mesh = Mesh()
    clock = clock or SystemClock()
    rng = rng or Random()  # noqa: S311 - jitter is no secret
    hello = Hello(versions=VERSIONS, role="gateway", peer=gateway_id, token=token, model=model, software=SOFTWARE)
    for url in urls:
        link = NodeLink(url, clock=clock, on_change=mesh.note_change)
        backoff = Backoff(rng, REDIAL_FIRST_S, REDIAL_MAX_S)
        mesh.add(link, Dialler(link, hello=hello, dial=dial, clock=clock, backoff=backoff))
    return mesh
