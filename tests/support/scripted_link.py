"""The gateway's end of a link to a scripted node; frames are encoded and decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shared.errors import LinkClosed
from shared.frame import decode_frame, encode_frame
from shared.link import LinkCounters
from shared.messages import MachineInfo, Message, NodeInfo, decode_header, encode_header
from shared.tensor_spec import WireTensor

if TYPE_CHECKING:
    from tests.support.scripted_node import ScriptedNode


class ScriptedLink:
    """The gateway's end of a link to a scripted node."""

    def __init__(self, node: ScriptedNode) -> None:
        self.counters = LinkCounters()
        self.node = node
        self.info = node.info
        self.is_closed = False
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()

    @property
    def peer(self) -> str:
        """The node's id."""
        return self.node.node_id

    @property
    def peer_machine(self) -> MachineInfo | None:
        """What the node said of its machine: nothing, for its range is given."""
        return None

    @property
    def peer_node(self) -> NodeInfo | None:
        """What the node said at the handshake."""
        return self.info

    def send_now(self, message: Message, tensors: Mapping[str, WireTensor] | None = None) -> bool:
        """Never at once: what is sent waits, as on a busy link."""
        return False

    async def send(self, message: Message, tensors: Mapping[str, WireTensor] | None = None) -> None:
        """Hand a message to the node."""
        if self.is_closed:
            raise LinkClosed("link_closed", "the link is closed")
        pieces = encode_frame(encode_header(message), tensors)
        self.counters.count_sent(message.kind, pieces)
        self.node.receive(self, b"".join(pieces))

    async def receive(self) -> tuple[Message, dict[str, WireTensor]]:
        """The node's next message."""
        data = await self._arrived.get()
        if data is None:
            raise LinkClosed("connection_lost", "the node is gone")
        frame = decode_frame(data)
        message = decode_header(frame.header)
        self.counters.count_received(message.kind, len(data))
        return message, frame.tensors

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close this end."""
        self.cut()

    def cut(self) -> None:
        """Lose the connection."""
        self.is_closed = True
        self._arrived.put_nowait(None)

    def deliver(self, message: Message, tensors: Mapping[str, WireTensor] | None = None) -> None:
        """Let a message of the node arrive."""
        if not self.is_closed:
            self._arrived.put_nowait(b"".join(encode_frame(encode_header(message), tensors)))

    def deliver_noise(self) -> None:
        """Let bytes arrive that are no frame."""
        if not self.is_closed:
            self._arrived.put_nowait(b"no frame")
