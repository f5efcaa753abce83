"""One open link as the node uses it: a reader, and a bounded queue of what is to be sent.

Answers come from the compute thread's callbacks, which cannot wait. So they are queued here, and a peer
that does not read what it asked for loses its link instead of filling the node's memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import structlog

from shared.clock import Clock
from shared.errors import FrameError, LinkClosed, MeshError
from shared.link import Link
from shared.messages import Error, Message, StepResult
from shared.tensor_spec import WireTensor

OUTGOING_FRAMES_MAX = 1024
"""Answers that may wait for a peer: four times what it can have queued here."""
OUTGOING_BYTES_MAX = 256 * 1024 * 1024
"""Tensors that may wait for a peer behind the frame being sent: the largest payload of one frame."""
CLOSE_SLOW_READER = 1008
SILENCE_S_MAX = 60.0
"""A gateway sends a heartbeat every half second; a link silent for so long is dead without having closed."""

log = structlog.stdlib.get_logger(__name__)

Tensors = Mapping[str, WireTensor]
Handle = Callable[["Peer", Message, Tensors], None]


class Peer:
    """A gateway at the other end of a link.

    Args:
        link: Open; the peer owns it.
        handle: Called with each message received; must not block.
        clock: Notes when the peer was last heard.
        url: Where this node dialled it; None where the peer has dialled.
        silence_s_max: Saying nothing for longer costs it its link.
        frames_max: Bound of the outgoing queue.
        bytes_max: Bound of the outgoing queue.
    """

    def __init__(
        self,
        link: Link,
        *,
        handle: Handle,
        clock: Clock,
        url: str | None = None,
        silence_s_max: float = SILENCE_S_MAX,
        frames_max: int = OUTGOING_FRAMES_MAX,
        bytes_max: int = OUTGOING_BYTES_MAX,
    ) -> None:
        self.link = link
        self.heard_at = clock.monotonic()
        self.silence_s_max = silence_s_max
        self.closed = False
        self._url = url
        self._handle = handle
        self._clock = clock
        self._frames_max = frames_max
        self._bytes_max = bytes_max
        self._outgoing: deque[tuple[Message, Tensors]] = deque()
        self._outgoing_bytes = 0
        self._work = asyncio.Event()
        self._nothing_waits = asyncio.Event()
        self._nothing_waits.set()
        self._giving_up = asyncio.Event()
        self._reason: MeshError = LinkClosed("link_closed", "the link is closed")

    @property
    def name(self) -> str:
        """The peer's id."""
        return self.link.peer

    @property
    def is_gateway(self) -> bool:
        """Whether it is one: nodes dial gateways only, but may be dialled by other nodes."""
        return self._url is not None or self.link.hello.role == "gateway"

    def url_of(self, path: str | None) -> str | None:
        """The HTTP address of a path on the gateway that was dialled; None for a peer whose address is not known."""
        if path is None or self._url is None:
            return None
        dialled = urlsplit(self._url)
        scheme = "https" if dialled.scheme == "wss" else "http"
        prefix = dialled.path.rstrip("/").removesuffix("/mesh")  # a reverse proxy's
        return f"{scheme}://{dialled.netloc}{prefix}/{path.lstrip('/')}"

    def send(self, message: Message, tensors: Tensors | None = None) -> bool:
        """Queue a message. Returns False when the link is closed, or closes now because the peer reads too slowly."""
        if self.closed or self._giving_up.is_set():
            return False
        tensors = tensors or {}
        nbytes = payload_bytes(tensors)
        over_bytes = bool(self._outgoing) and self._outgoing_bytes + nbytes > self._bytes_max
        if over_bytes or len(self._outgoing) >= self._frames_max:
            limit = f"{self._bytes_max} bytes" if over_bytes else f"{self._frames_max} frames"
            self.give_up(LinkClosed("slow_reader", f"more than {limit} wait for the peer to read"))
            return False
        if not self._outgoing and self._send_now(message, tensors):
            return True
        self._outgoing.append((message, tensors))
        self._outgoing_bytes += nbytes
        self._nothing_waits.clear()
        self._work.set()
        return True

    def _send_now(self, message: Message, tensors: Tensors) -> bool:
        try:
            return self.link.send_now(message, tensors)
        except MeshError:
            return False  # the sending task meets it again, and knows what to do

    def give_up(self, reason: LinkClosed) -> None:
        """Close the link as soon as the event loop gets to it; `run` raises the reason."""
        self._reason = reason
        self._giving_up.set()

    async def flush(self) -> None:
        """Wait until nothing is queued or the link is closed. The caller bounds the time."""
        await self._nothing_waits.wait()

    async def run(self) -> None:
        """Receive and send until the link ends; the link is closed when this returns or raises.

        Raises:
            MeshError: Why the link ended.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive_all())
                tasks.create_task(self._send_all())
                tasks.create_task(self._watch())
        except* MeshError as group:
            self._reason = _first(group)
        finally:
            self.closed = True
            self._outgoing.clear()
            self._nothing_waits.set()
            await self.link.close(*_close_arguments(self._reason))
        raise self._reason

    async def _receive_all(self) -> None:
        while True:
            message, tensors = await self.link.receive()
            self.heard_at = self._clock.monotonic()
            self._handle(self, message, tensors)

    async def _send_all(self) -> None:
        while True:
            while self._outgoing:
                message, tensors = self._outgoing[0]
                await self._send_one(message, tensors)
                self._outgoing.popleft()
                self._outgoing_bytes -= payload_bytes(tensors)
            self._nothing_waits.set()
            self._work.clear()
            await self._work.wait()

    async def _send_one(self, message: Message, tensors: Tensors) -> None:
        try:
            await self.link.send(message, tensors)
        except FrameError as error:
            log.warning("answer.too_large", peer=self.name, kind=message.kind, code=error.code)
            if not isinstance(message, StepResult):
                raise
            await self.link.send(_too_large(message, error))

    async def _watch(self) -> None:
        await self._giving_up.wait()
        raise self._reason


def _too_large(result: StepResult, error: FrameError) -> Error:
    return Error(
        code=error.code,
        message=error.message,
        session=result.session,
        step_index=result.step_index,
        epoch=result.epoch,
    )


def payload_bytes(tensors: Tensors) -> int:
    """What a message's tensors take."""
    return sum(tensor.data.nbytes for tensor in tensors.values())


def _first(group: BaseExceptionGroup[MeshError]) -> MeshError:
    for error in group.exceptions:
        return error if isinstance(error, MeshError) else _first(error)
    raise ValueError("an empty exception group")


def _close_arguments(reason: MeshError) -> tuple[int, str]:
    return (CLOSE_SLOW_READER if reason.code == "slow_reader" else 1000), reason.code
