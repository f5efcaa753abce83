"""Links: the asyncio shell around `shared.link_state`, over whatever moves binary messages.

A `Link` has one reader (whoever calls `receive` in a loop) and any number of senders. It starts no task
of its own and keeps no queue of its own: what its user does not read, the peer cannot go on sending.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.errors import DeadlineExceeded, FrameError, HandshakeRefused, LinkClosed
from shared.frame import DEFAULT_LIMITS, FrameLimits
from shared.handshake import check_welcome
from shared.link_state import Broken, Event, LinkProtocol, LinkState, Pieces, Received, Unanswerable
from shared.messages import Hello, MachineInfo, Message, NodeInfo, Refused, Welcome
from shared.tensor_spec import WireTensor
from shared.websocket import CLOSE_TIMEOUT_S, WebSocketTransport, connect_websocket

HANDSHAKE_TIMEOUT_S = 5.0
"""From dialling to `Welcome`; a peer that says nothing for so long is refused."""

SENT_NOW_BYTES_MAX = 64 * 1024
"""Payload up to here may leave without waiting: a few positions of the widest models."""

CLOSE_NORMAL = 1000
CLOSE_PROTOCOL_ERROR = 1002
CLOSE_REFUSED = 1008


class Transport(Protocol):
    """What moves whole binary messages between two sides, in order."""

    async def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send the concatenation of the pieces as one message; raises `LinkClosed`. Cancelling is safe."""
        ...

    def can_send_now(self) -> bool:
        """Whether `send_now` may be called: the transport is open, and nothing waits to leave."""
        ...

    def send_now(self, pieces: Sequence[bytes | memoryview]) -> None:
        """As `send`, without waiting; only directly after `can_send_now` has said so."""
        ...

    async def receive(self) -> bytes:
        """The next message; raises `LinkClosed`, or `FrameError` for what is not binary. Cancelling is safe."""
        ...

    def allow(self, frame_bytes_max: int) -> None:
        """Receive messages of up to this length from now on; called once a dialler has shown its token."""
        ...

    async def close(self, code: int = CLOSE_NORMAL, reason: str = "") -> None:
        """Close within a bounded time, waking whoever sends or receives. Closing again does nothing."""
        ...


@dataclass(slots=True)
class LinkCounters:
    """Frames and bytes by message kind, the handshake and answers to unknown kinds included."""

    sent_frames: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    received_frames: Counter[str] = field(default_factory=Counter)
    received_bytes: Counter[str] = field(default_factory=Counter)

    def count_sent(self, kind: str, pieces: Pieces) -> None:
        """Count one frame that is about to leave."""
        self.sent_frames[kind] += 1
        self.sent_bytes[kind] += sum(map(len, pieces))

    def count_received(self, kind: str, frame_bytes: int) -> None:
        """Count one frame that has come."""
        self.received_frames[kind] += 1
        self.received_bytes[kind] += frame_bytes


class Link:
    """One open link. Made by `dial`, `dial_over` and `accept`, once both sides have agreed.

    Args:
        transport: Moves the bytes; the link owns it.
        protocol: This side's state; the link owns it.
    """

    def __init__(self, transport: Transport, protocol: LinkProtocol) -> None:
        self.counters = LinkCounters()
        self._transport = transport
        self._protocol = protocol

    @property
    def state(self) -> LinkState:
        """Where the link is in its life."""
        return self._protocol.state

    @property
    def hello(self) -> Hello:
        """What the dialer said, whichever side that is."""
        if self._protocol.hello is None:
            raise ValueError("the link has seen no hello")
        return self._protocol.hello

    @property
    def welcome(self) -> Welcome:
        """What the acceptor answered, whichever side that is."""
        if self._protocol.welcome is None:
            raise ValueError("the link has seen no welcome")
        return self._protocol.welcome

    @property
    def peer(self) -> str:
        """The other side's id."""
        return self._said_by_peer.peer

    @property
    def peer_node(self) -> NodeInfo | None:
        """What the other side said of itself at the handshake, if it is a node."""
        return self._said_by_peer.node

    @property
    def peer_machine(self) -> MachineInfo | None:
        """What the other side said of its machine at the handshake, if it is a node that takes any range."""
        return self._said_by_peer.machine

    @property
    def _said_by_peer(self) -> Hello | Welcome:
        return self.welcome if self._protocol.role == "dialer" else self.hello

    async def send(self, message: Message, tensors: Mapping[str, WireTensor] | None = None) -> None:
        """Send a message; returns when it has left or waits in a bounded buffer.

        Several tasks may send at once; each message leaves whole. The tensors' buffers must not change
        until this returns. Cancelling is safe.

        Raises:
            LinkClosed: The link is closed.
            LocalProtocolError: The link's state does not allow this message.
            FrameError: The message is over the limits.
            ValueError: A field's value could not be read by any receiver.
        """
        pieces = self._protocol.send(message, tensors)
        self.counters.count_sent(message.kind, pieces)
        await self._send_pieces(pieces)

    def send_now(self, message: Message, tensors: Mapping[str, WireTensor] | None = None) -> bool:
        """Send a short message at once, if nothing waits to leave before it.

        Spares the hot path a task's wake-up: a one-token step or its answer leaves within this call.

        Returns:
            False, having done nothing, when the caller must use `send`.

        Raises:
            LocalProtocolError: The link's state does not allow this message.
            FrameError: The message is over the limits.
            ValueError: A field's value could not be read by any receiver.
        """
        payload_bytes = sum(tensor.data.nbytes for tensor in tensors.values()) if tensors else 0
        if payload_bytes > SENT_NOW_BYTES_MAX or not self._transport.can_send_now():
            return False
        pieces = self._protocol.send(message, tensors)
        self.counters.count_sent(message.kind, pieces)
        self._transport.send_now(pieces)
        return True

    async def receive(self) -> tuple[Message, dict[str, WireTensor]]:
        """The next message and its tensors, which are views into the received frame.

        One task at a time may receive. Unknown kinds are answered and skipped. Cancelling loses nothing.

        Raises:
            LinkClosed: The link is closed; the code is the peer's reason where it gave one.
            FrameError: The peer sent what is no frame or no message. It was told, and the link is closed.
            RemoteProtocolError: The peer sent what the state does not allow. It was told, and the link is closed.
        """
        while True:
            event = await self._receive_event()
            if isinstance(event, Received):
                return event.message, event.tensors
            if isinstance(event, Broken):
                await self._end(event)
                raise event.error
            self.counters.count_sent("unsupported", event.reply)
            await self._send_pieces(event.reply)

    async def close(self, code: int = CLOSE_NORMAL, reason: str = "") -> None:
        """Close the link within `CLOSE_TIMEOUT_S`; whoever sends or receives gets `LinkClosed`."""
        self._protocol.close()
        await self._transport.close(code, reason)

    async def _send_pieces(self, pieces: Pieces) -> None:
        try:
            await self._transport.send(pieces)
        except LinkClosed:
            self._protocol.close()
            raise

    async def _receive_event(self) -> Event:
        try:
            data = await self._transport.receive()
        except LinkClosed:
            self._protocol.close()
            raise
        except FrameError as error:
            return self._protocol.fail(error)
        event = self._protocol.receive(data)
        self.counters.count_received(_kind_of(event), len(data))
        return event

    async def _end(self, event: Broken) -> None:
        """Say why, as far as the peer still listens, and close."""
        if event.reply is not None:
            self.counters.count_sent("error", event.reply)
            with contextlib.suppress(LinkClosed, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._transport.send(event.reply)
        await self.close(CLOSE_PROTOCOL_ERROR if event.reply else CLOSE_NORMAL, event.error.code)


def _kind_of(event: Event) -> str:
    if isinstance(event, Received):
        return event.message.kind
    return "unknown" if isinstance(event, Unanswerable) else "error"


async def dial(
    url: str,
    hello: Hello,
    *,
    limits: FrameLimits = DEFAULT_LIMITS,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
    context: ssl.SSLContext | None = None,
) -> Link:
    """Open a link to the peer that listens at a ``ws://`` or ``wss://`` address.

    Args:
        url: Where it listens.
        hello: What this side says of itself.
        limits: What this side is willing to receive.
        timeout_s: For everything from the first packet to `Welcome`.
        context: TLS of a ``wss://`` address; None trusts what the system trusts.

    Raises:
        HandshakeRefused: The peer refused, or this side refuses the peer's answer.
        LinkClosed: The peer cannot be reached, is no meshnet peer, or closed.
        DeadlineExceeded: It took longer than `timeout_s`.
        FrameError: The peer sent what is no frame.
        RemoteProtocolError: The peer sent something else than an answer.
    """
    async with _deadline(timeout_s, url):
        transport = await connect_websocket(url, limits, context)
        return await _offer(transport, hello, limits)


async def dial_over(
    transport: Transport, hello: Hello, *, limits: FrameLimits = DEFAULT_LIMITS, timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> Link:
    """As `dial`, over a transport that is already open; it is closed if no link comes of it."""
    async with _deadline(timeout_s, "the peer"):
        return await _offer(transport, hello, limits)


async def accept(
    transport: Transport,
    *,
    answer: Callable[[Hello], Welcome | Refused],
    limits: FrameLimits = DEFAULT_LIMITS,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> Link:
    """Open a link with a peer that has dialled; the transport is closed if no link comes of it.

    Args:
        transport: Just opened, nothing read.
        answer: Decides; see `shared.handshake.check_hello`. What it raises passes through.
        limits: What this side is willing to receive.
        timeout_s: How long the peer may take to say `Hello`.

    Raises:
        HandshakeRefused: `answer` refused the peer, which was told.
        LinkClosed: The peer closed.
        DeadlineExceeded: It took longer than `timeout_s`.
        FrameError: The peer sent what is no frame.
        RemoteProtocolError: The peer sent something else than `Hello`.
    """
    async with _deadline(timeout_s, "the dialer"):
        link = Link(transport, LinkProtocol("acceptor", limits))
        async with _closed_on_failure(link):
            hello, _ = await link.receive()
            assert isinstance(hello, Hello)  # noqa: S101 - the state table lets nothing else through
            reply = answer(hello)
            if isinstance(reply, Welcome):
                transport.allow(limits.frame_bytes_max)
            await link.send(reply)
            if isinstance(reply, Refused):
                raise HandshakeRefused(reply.code, reply.message, peer=hello.peer)
        return link


async def _offer(transport: Transport, hello: Hello, limits: FrameLimits) -> Link:
    link = Link(transport, LinkProtocol("dialer", limits))
    async with _closed_on_failure(link):
        await link.send(hello)
        answer, _ = await link.receive()
        if isinstance(answer, Refused):
            raise HandshakeRefused(answer.code, answer.message)
        if refusal := check_welcome(link.welcome, hello):
            raise refusal
    return link


@contextlib.asynccontextmanager
async def _closed_on_failure(link: Link) -> AsyncIterator[None]:
    try:
        yield
    except HandshakeRefused as refusal:
        await link.close(CLOSE_REFUSED, refusal.code)
        raise
    except BaseException:
        await link.close(CLOSE_PROTOCOL_ERROR, "handshake failed")
        raise


@contextlib.asynccontextmanager
async def _deadline(timeout_s: float, whom: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded("handshake_timeout", f"no handshake with {whom} within {timeout_s} s") from error


__all__ = [
    "CLOSE_NORMAL",
    "CLOSE_PROTOCOL_ERROR",
    "CLOSE_REFUSED",
    "HANDSHAKE_TIMEOUT_S",
    "Link",
    "LinkCounters",
    "Transport",
    "WebSocketTransport",
    "accept",
    "dial",
    "dial_over",
]
