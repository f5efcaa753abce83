"""A connected pair of in-memory transports, whose faults the test decides frame by frame.

A real link neither reorders, drops nor duplicates; these can drop and duplicate because what is built on
links (steps, heartbeats, epochs) must survive a peer or a proxy that does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from shared.clock import Clock, SystemClock
from shared.errors import LinkClosed
from shared.handshake import VERSIONS
from shared.link import Link, Transport, accept, dial_over
from shared.messages import Hello, NodeInfo, Welcome

MEMORY_FRAMES_MAX = 32
"""Frames in flight before a sender waits, as the transport over sockets has its own bounds."""

Faults = Callable[[bytes], Sequence[float]]
"""Decides a frame's fate: one delay in seconds per copy that arrives; no delay at all drops it."""


def deliver(_frame: bytes) -> Sequence[float]:
    """The fate of a frame on a good link."""
    return (0.0,)


class Direction:
    """One way of the pair: frames wait here, in order, until they are due.

    Args:
        clock: Measures delays.
    """

    def __init__(self, clock: Clock) -> None:
        self.faults: Faults = deliver
        self.sent: list[bytes] = []
        self._clock = clock
        self._frames: deque[tuple[float, bytes]] = deque()
        self._changed = asyncio.Condition()
        self._ended: LinkClosed | None = None

    async def put(self, frame: bytes) -> None:
        """Send one frame; waits while the direction is full."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ended or len(self._frames) < MEMORY_FRAMES_MAX)
            if self._ended:
                raise self._ended
            self.sent.append(frame)
            for delay_s in self.faults(frame):
                earliest_s = self._frames[-1][0] if self._frames else 0.0
                self._frames.append((max(earliest_s, self._clock.monotonic() + delay_s), frame))
            self._changed.notify_all()

    async def get(self) -> bytes:
        """The next frame, once it is due; what was sent before the end still arrives."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ended or self._frames)
        if not self._frames and self._ended:
            raise self._ended
        await self._clock.sleep(self._frames[0][0] - self._clock.monotonic())
        async with self._changed:
            if not self._frames:
                raise self._ended or LinkClosed("connection_lost", "the connection was lost")
            _, frame = self._frames.popleft()
            self._changed.notify_all()
        return frame

    async def end(self, reason: LinkClosed, *, lose_frames: bool) -> None:
        """Nothing more is sent; with `lose_frames` what is on its way is lost too."""
        async with self._changed:
            self._ended = self._ended or reason
            if lose_frames:
                self._frames.clear()
            self._changed.notify_all()


class MemoryTransport:
    """One end of the pair; a `shared.link.Transport`."""

    def __init__(self, outgoing: Direction, incoming: Direction) -> None:
        self.outgoing = outgoing
        self.incoming = incoming
        self.closed_with: tuple[int, str] | None = None
        self.allowed_bytes_max: int | None = None

    async def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send the concatenation of the pieces."""
        await self.outgoing.put(b"".join(pieces))

    def can_send_now(self) -> bool:
        """Never: a test may put a delay on every frame."""
        return False

    def send_now(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Not called, since `can_send_now` never says so."""
        raise AssertionError("send_now without can_send_now")

    async def receive(self) -> bytes:
        """The next frame."""
        return await self.incoming.get()

    def allow(self, frame_bytes_max: int) -> None:
        """Note what the link allows; frames in memory take no more than they already do."""
        self.allowed_bytes_max = frame_bytes_max

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close both ways; what this end sent before still arrives."""
        self.closed_with = self.closed_with or (code, reason)
        closed = LinkClosed("link_closed", f"the connection was closed: {reason or code}", close_code=code)
        await self.outgoing.end(closed, lose_frames=False)
        await self.incoming.end(closed, lose_frames=True)

    async def cut(self) -> None:
        """Lose the connection: both ends notice at once, and nothing on its way arrives."""
        lost = LinkClosed("connection_lost", "the connection was lost")
        await self.outgoing.end(lost, lose_frames=True)
        await self.incoming.end(lost, lose_frames=True)


def create_memory_pair(clock: Clock | None = None) -> tuple[MemoryTransport, MemoryTransport]:
    """Two connected ends: the dialer's and the acceptor's."""
    there = Direction(clock or SystemClock())
    back = Direction(clock or SystemClock())
    return MemoryTransport(there, back), MemoryTransport(back, there)


async def create_memory_links(
    *, hello: Hello | None = None, node: NodeInfo | None = None, clock: Clock | None = None
) -> tuple[Link, Link, MemoryTransport, MemoryTransport]:
    """Two links that have shaken hands (the dialer's, the acceptor's), and the transports below them."""
    near, far = create_memory_pair(clock)
    welcome = Welcome(version=VERSIONS[0], peer=node.node if node else "node", node=node)
    dialled, accepted = await asyncio.gather(
        dial_over(near, hello or Hello(versions=VERSIONS, role="gateway", peer="gateway")),
        accept(far, answer=lambda _hello: welcome),
    )
    return dialled, accepted, near, far


_: type[Transport] = MemoryTransport
