"""Joining: a node dials a gateway, and keeps at it for as long as it lives.

Once the link is open it is the same link as one that the gateway has dialled: the same messages, served by the
same `NodeService`. What is different is only who opened it, so a node behind NAT needs no open port.

An attempt fails for one of two reasons. The gateway cannot be reached: that ends soon or late by itself, and the node
tries again within `RETRY_S_MAX`. The gateway refuses the node: that takes a person, or the end of a link that the
gateway still believes in, and the node asks again within `REFUSED_RETRY_S_MAX`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

import structlog

from shard.peer import Peer
from shard.service import NodeService
from shared.backoff import Backoff
from shared.clock import Clock
from shared.errors import HandshakeRefused, MeshError
from shared.handshake import VERSIONS
from shared.link import Link, dial
from shared.messages import Hello, NodeInfo
from shared.version import SOFTWARE

RETRY_S_MAX = 5.0
"""A gateway that comes back has its nodes again within this."""
REFUSED_RETRY_S_FIRST, REFUSED_RETRY_S_MAX = 1.0, 30.0
"""The first is soon: a gateway may believe for seconds in a link of this node that is gone (`duplicate_node`)."""
LASTED_S = 5.0
"""A link that lived for so long was a good one: the next failure is a new one."""
SILENCE_S_MAX = 10.0
"""A gateway sends a heartbeat every half second. A mapping that a NAT has forgotten closes nothing: silence tells."""
FAILURES_REMEMBERED_MAX = 16
"""Kinds of failure that are logged once each; one more begins anew."""

Dial = Callable[[str, Hello], Awaitable[Link]]

log = structlog.stdlib.get_logger(__name__)


async def dial_gateway(url: str, hello: Hello) -> Link:
    """Open a link to a gateway: the one place where a node dials.

    Raises:
        MeshError: No link comes of it; see `shared.link.dial`.
    """
    return await dial(url, hello)


class Join:
    """The link to one gateway, opened again whenever it ends.

    Args:
        url: The gateway's ``ws://`` or ``wss://`` address, path included.
        service: Serves the link.
        token: The mesh token, unless `dial` sees to that.
        clock: Time.
        rng: For the jitter.
        dial: Opens a link.
    """

    def __init__(
        self,
        url: str,
        *,
        service: NodeService,
        token: str | None = None,
        clock: Clock,
        rng: Random,
        dial: Dial = dial_gateway,
    ) -> None:
        self.url = url
        self._service = service
        self._token = token
        self._clock = clock
        self._dial = dial
        self._retries = Backoff(rng, max_s=RETRY_S_MAX)
        self._refused_retries = Backoff(rng, first_s=REFUSED_RETRY_S_FIRST, max_s=REFUSED_RETRY_S_MAX)
        self._failures: set[tuple[str, str]] = set()
        self._refused_model: str | None = None
        self._is_over = False

    def stop_dialling(self) -> None:
        """Leave it at the link there is."""
        self._is_over = True

    async def run(self) -> None:
        """Dial and serve until cancelled, or until the last link ends after `stop_dialling`."""
        log.info("gateway.joining", url=self.url, node=self._service.node_id)
        while not self._is_over:
            delay_s = await self._dial_and_serve()
            await self._clock.sleep(delay_s)

    async def _dial_and_serve(self) -> float:
        """One attempt; gives the seconds to wait before the next."""
        info = self._service.info
        hello = self._hello(info)
        try:
            link = await self._dial(self.url, hello)
        except HandshakeRefused as refusal:
            self._note_refusal(refusal, hello)
            return self._refused_retries.next_delay_s()
        except MeshError as failure:
            self._note("gateway.unreachable", failure)
            return self._retries.next_delay_s()
        await self._serve(link, info)
        return self._retries.next_delay_s()

    async def _serve(self, link: Link, info: NodeInfo | None) -> None:
        opened_at = self._clock.monotonic()
        log.info("gateway.joined", url=self.url, gateway=link.peer, software=link.welcome.software)
        self._refused_retries.reset()
        peer = Peer(link, handle=self._service.handle, clock=self._clock, url=self.url, silence_s_max=SILENCE_S_MAX)
        try:
            await self._service.serve(peer, described=info)
        except MeshError as reason:
            lasted_s = self._clock.monotonic() - opened_at
            if lasted_s >= LASTED_S:
                self._retries.reset()
                self._failures.clear()
            log.info("gateway.left", url=self.url, code=reason.code, reason=reason.message, lasted_s=round(lasted_s, 1))

    def _hello(self, info: NodeInfo | None) -> Hello:
        """What the node says of itself; nothing of a range that this gateway has refused, if it may give another."""
        machine = self._service.machine
        if machine is not None and info is not None and info.model == self._refused_model:
            info = None
        return Hello(
            versions=VERSIONS,
            role="node",
            peer=self._service.node_id,
            token=self._token,
            node=info,
            machine=machine,
            software=SOFTWARE,
        )

    def _note_refusal(self, refusal: HandshakeRefused, hello: Hello) -> None:
        if refusal.code == "model_mismatch" and hello.node is not None:
            self._refused_model = hello.node.model
        self._note("gateway.refuses", refusal)

    def _note(self, event: str, failure: MeshError) -> None:
        """Log each kind of failure once, until a link has lasted again."""
        kind = (failure.code, failure.message)
        if kind in self._failures:
            return
        if len(self._failures) >= FAILURES_REMEMBERED_MAX:
            self._failures.clear()
        self._failures.add(kind)
        log.warning(event, url=self.url, code=failure.code, reason=failure.message)
