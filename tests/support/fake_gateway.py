"""A gateway's accepting side without a gateway: nodes join it, and a test says what they are told.

In a test's own event loop::

    async with running_gateway() as gateway:
        ...  # a node that joins gateway.url
        node = await gateway.joined()
        await node.load("0:4")
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from websockets.asyncio.server import ServerConnection, serve

from shared.errors import MeshError
from shared.handshake import VERSIONS, check_hello
from shared.layers import LayerRange
from shared.link import Link, WebSocketTransport, accept
from shared.messages import Heartbeat, Hello, Load, Loaded, NodeInfo, NodeStats, Refused, Welcome
from shared.websocket import listen_options
from tests.support.fake_node import FINGERPRINT
from tests.support.node_client import NodeClient

JOIN_TIMEOUT_S = 100.0
"""A node process imports and measures before it joins."""
LOAD_TIMEOUT_S = 100.0
"""A node process imports torch before its first load."""
HEARTBEAT_S = 0.5
ASKED_SEQ = 1
"""Number of the heartbeats that a test asks for; those that keep the link alive have another."""
_UNASSIGNED = NodeInfo(node="unassigned", model="none", layers=LayerRange(0, 1), num_layers=1)


class JoinedNode(NodeClient):
    """The link to a node that has joined; `info` is what it said last of the range it holds."""

    def __init__(self, link: Link) -> None:
        super().__init__(link, link.hello.node or _UNASSIGNED)
        self.hello = link.hello

    async def ask(self, layers: str, *, model: str = FINGERPRINT, name: str = "fake", num_layers: int = 4) -> None:
        """Send a load."""
        await self.link.send(
            Load(layers=LayerRange.parse(layers), model=model, model_name=name, num_layers=num_layers, files="/files")
        )

    async def loaded(self, *states: str) -> Loaded:
        """The next description in one of these states, `ready` unless told otherwise."""
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            while True:
                message, _ = await self.link.receive()
                if not isinstance(message, Loaded):
                    self.others.append(message)
                    continue
                self.info = message.node
                if message.node.state in (states or ("ready",)):
                    return message

    async def stats(self) -> NodeStats:
        """The node's figures of now, and not of an earlier heartbeat."""
        await self.link.send(Heartbeat(seq=ASKED_SEQ))
        while True:
            heartbeat, _ = await self.receive(Heartbeat)
            if heartbeat.seq == ASKED_SEQ:
                assert heartbeat.stats is not None
                return heartbeat.stats

    async def load(self, layers: str, **fields: str | int) -> Loaded:
        """Send a load, and wait until it is done."""
        await self.ask(layers, **fields)  # type: ignore[arg-type]
        return await self.loaded()


@dataclass
class FakeGateway:
    """What a node meets when it dials.

    Args:
        name: Its id.
        token: The mesh token.
        model: The model it serves; None accepts any.
        refusals: Given to as many nodes as there are, one each, before one is welcomed.
    """

    name: str = "gateway"
    token: str | None = None
    model: str | None = None
    refusals: list[Refused] = field(default_factory=list)
    url: str = ""
    hellos: list[Hello] = field(default_factory=list)
    _links: asyncio.Queue[Link] = field(default_factory=asyncio.Queue)

    async def joined(self) -> JoinedNode:
        """The next node that joins."""
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            return JoinedNode(await self._links.get())

    def answer(self, hello: Hello) -> Welcome | Refused:
        """What a node is told."""
        self.hellos.append(hello)
        if self.refusals:
            return self.refusals.pop(0)
        refusal = check_hello(hello, tokens=[self.token] if self.token else [], model=self.model)
        return refusal or Welcome(version=VERSIONS[0], peer=self.name)

    async def serve_link(self, connection: ServerConnection) -> None:
        """One node's link, kept until the gateway ends."""
        with contextlib.suppress(MeshError):
            link = await accept(WebSocketTransport(connection), answer=self.answer)
            self._links.put_nowait(link)
            while True:
                await link.send(Heartbeat(seq=0))
                await asyncio.sleep(HEARTBEAT_S)


@contextlib.asynccontextmanager
async def running_gateway(port: int = 0, **fields: object) -> AsyncIterator[FakeGateway]:
    """A gateway on loopback; with the block it is gone, and its links with it."""
    gateway = FakeGateway(**fields)  # type: ignore[arg-type]
    async with serve(gateway.serve_link, "127.0.0.1", port, **listen_options()) as server:
        gateway.url = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/mesh"
        yield gateway
