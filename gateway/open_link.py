"""What the gateway needs of an open link, so that tests can stand in for sockets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from shared.link import LinkCounters
from shared.messages import Hello, MachineInfo, Message, NodeInfo
from shared.tensor_spec import WireTensor


class OpenLink(Protocol):
    """What is needed of a `shared.link.Link`."""

    counters: LinkCounters

    @property
    def peer(self) -> str:
        """The node's id."""
        ...

    @property
    def peer_machine(self) -> MachineInfo | None:
        """What the node said of its machine, if it takes any range."""
        ...

    @property
    def peer_node(self) -> NodeInfo | None:
        """What the node said of itself."""
        ...

    async def send(self, message: Message, tensors: Mapping[str, WireTensor] | None = None) -> None:
        """Send one message; raises `LinkClosed`, or `FrameError` for what is over a limit."""
        ...

    def send_now(self, message: Message, tensors: Mapping[str, WireTensor] | None = None) -> bool:
        """Send a short message at once; False, having done nothing, when something waits to leave before it."""
        ...

    async def receive(self) -> tuple[Message, dict[str, WireTensor]]:
        """The next message; raises `LinkClosed` and other `MeshError`s when there will be none."""
        ...

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close; whoever sends or receives gets `LinkClosed`."""
        ...


class JoinedLink(OpenLink, Protocol):
    """An open link that the other side has dialled."""

    @property
    def hello(self) -> Hello:
        """What it said."""
        ...


Dial = Callable[[str, Hello], Awaitable[OpenLink]]
"""Opens a link to an address, raising a `MeshError` when that fails."""


def add_counters(total: LinkCounters, part: LinkCounters) -> None:
    """Add the second to the first."""
    total.sent_frames.update(part.sent_frames)
    total.sent_bytes.update(part.sent_bytes)
    total.received_frames.update(part.received_frames)
    total.received_bytes.update(part.received_bytes)
