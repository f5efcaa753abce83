"""All configured nodes, by the id that each says it has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

import structlog

from gateway.node_link import NodeLink
from gateway.open_link import Dial
from shared.backoff import Backoff
from shared.clock import Clock, SystemClock
from shared.errors import HandshakeRefused
from shared.handshake import VERSIONS
from shared.link import dial
from shared.messages import Cancel, Fork, Hello, NodeInfo, Release
from shared.version import SOFTWARE

REDIAL_FIRST_S = 0.05
REDIAL_MAX_S = 2.0
"""A node that comes back is found within this long, at the price of one refused connection every so often."""

log = structlog.stdlib.get_logger(__name__)


class Mesh:
    """Keeps a link to every node. Made by `create_mesh`; `run` keeps the links up until it is cancelled.

    Two addresses may lead to nodes of the same id. Then the one configured first is used as long as it
    is connected, and the other is left alone.
    """

    def __init__(self) -> None:
        self.links: list[NodeLink] = []
        self._open: dict[str, NodeLink] = {}
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    def add(self, link: NodeLink) -> None:
        """Configure one more node; before `run`."""
        self.links.append(link)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this whenever a node's description or reachability has changed. It must not raise."""
        self._listeners.append(listener)

    def note_change(self) -> None:
        """Called by links when their node's description or reachability has changed."""
        self._open = {}
        for link in self.links:
            if link.is_open and link.info is not None and self._open.setdefault(link.info.node, link) is not link:
                log.warning("node.duplicated", node=link.info.node, url=link.url)
        self.announce()

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
        """What the connected nodes say of themselves."""
        return [link.info for link in self._open.values() if link.info is not None]

    def link(self, node: str) -> NodeLink | None:
        """The open link to a node."""
        return self._open.get(node)

    def is_used(self, link: NodeLink) -> bool:
        """False for a link that is down, or whose node's id another link has."""
        return link.info is not None and self._open.get(link.info.node) is link

    def post(self, node: str, message: Release | Cancel) -> None:
        """Send without waiting, as `NodeLink.post` does, to every process that has had this id.

        Two may have it, one after the other or by mistake, and each may hold the session. A node never heard
        of is left alone.
        """
        for link in self.links:
            if link.info is not None and link.info.node == node:
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

    async def run(self) -> None:
        """Keep all links up until cancelled, and close them then."""
        async with asyncio.TaskGroup() as tasks:
            for link in self.links:
                tasks.create_task(link.run())


def create_mesh(
    urls: Sequence[str],
    *,
    gateway_id: str,
    model: str | None,
    token: str | None,
    dial: Dial = dial,
    clock: Clock | None = None,
    rng: Random | None = None,
) -> Mesh:
    """A mesh of the nodes that listen at these addresses. Needs a running event loop.

    Args:
        urls: ``ws://`` or ``wss://`` addresses.
        gateway_id: What this gateway calls itself.
        model: Fingerprint that nodes must serve; None accepts any.
        token: The mesh token.
        dial: Opens a link; tests give their own.
        clock: Time.
        rng: For the jitter between attempts.
    """
    mesh = Mesh()
    clock = clock or SystemClock()
    rng = rng or Random()  # noqa: S311 - jitter is no secret
    hello = Hello(versions=VERSIONS, role="gateway", peer=gateway_id, token=token, model=model, software=SOFTWARE)
    for url in urls:
        backoff = Backoff(rng, REDIAL_FIRST_S, REDIAL_MAX_S)
        mesh.add(NodeLink(url, hello=hello, dial=dial, clock=clock, backoff=backoff, on_change=mesh.note_change))
    return mesh
