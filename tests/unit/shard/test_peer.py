"""A link's outgoing side: bounded, in order, and never in the way of who answers."""

from __future__ import annotations

import asyncio

import pytest

from shard.peer import Peer
from shared.errors import FrameError, LinkClosed
from shared.messages import Error, Heartbeat, Message, StepResult
from shared.tensor_spec import WireTensor
from tests.support.fake_clock import FakeClock


class StubLink:
    """A link whose reader is as slow as the test says."""

    peer = "stub"

    def __init__(self) -> None:
        self.reading = asyncio.Event()
        self.idle = False
        self.sent: list[Message] = []
        self.closed_with: tuple[int, str] | None = None
        self.refuses: type[Message] | None = None
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()

    def send_now(self, message: Message, tensors: object = None) -> bool:
        """At once when the test says that the link is idle."""
        if not self.idle:
            return False
        if self.refuses and isinstance(message, self.refuses):
            raise FrameError("payload_too_large", "too large")
        self.sent.append(message)
        return True

    async def send(self, message: Message, tensors: object = None) -> None:
        """Waits until the test reads."""
        await self.reading.wait()
        if self.refuses and isinstance(message, self.refuses):
            raise FrameError("payload_too_large", "too large")
        self.sent.append(message)

    async def receive(self) -> tuple[Message, dict[str, WireTensor]]:
        """What the test puts in."""
        return await self.incoming.get(), {}

    async def close(self, code: int, reason: str) -> None:
        """Remember why."""
        self.closed_with = (code, reason)


def peer_over(link: StubLink, received: list[Message] | None = None, **limits: int) -> Peer:
    """A peer over a stub."""

    def handle(_: Peer, message: Message, __: object) -> None:
        if received is not None:
            received.append(message)

    return Peer(link, handle=handle, clock=FakeClock(), **limits)  # type: ignore[arg-type]


def tensors(nbytes: int) -> dict[str, WireTensor]:
    """One tensor of so many bytes."""
    return {"x": WireTensor("u8", (nbytes,), memoryview(bytes(nbytes)))}


async def run(peer: Peer) -> LinkClosed:
    """Run a peer until its link ends."""
    async with asyncio.timeout(5):
        with pytest.raises(LinkClosed) as ended:
            await peer.run()
    return ended.value


async def test_messages_leave_in_order() -> None:
    """What was queued first leaves first; flush returns when all has left."""
    link = StubLink()
    link.reading.set()
    peer = peer_over(link)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run(peer))
        for seq in range(3):
            assert peer.send(Heartbeat(seq=seq))
        await peer.flush()
        assert [message.seq for message in link.sent if isinstance(message, Heartbeat)] == [0, 1, 2]
        peer.give_up(LinkClosed("over", "the test is over"))
        assert (await running).code == "over"
    assert link.closed_with == (1000, "over")
    assert not peer.send(Heartbeat(seq=3))


async def test_number_of_waiting_messages_is_bounded() -> None:
    """One too many closes the link as a slow reader's, and nothing more is queued."""
    link = StubLink()
    peer = peer_over(link, frames_max=2)
    assert peer.send(Heartbeat(seq=0))
    assert peer.send(Heartbeat(seq=1))
    assert not peer.send(Heartbeat(seq=2))
    assert not peer.send(Heartbeat(seq=3))
    ended = await run(peer)
    assert ended.code == "slow_reader"
    assert "2 frames" in ended.message
    assert link.closed_with == (1008, "slow_reader")


async def test_bytes_behind_the_first_message_are_bounded() -> None:
    """A single large answer may always leave; what waits behind it is counted."""
    link = StubLink()
    peer = peer_over(link, bytes_max=100)
    result = StepResult(session="s", step_index=0)
    assert peer.send(result, tensors(1000))
    assert not peer.send(result, tensors(1))
    assert (await run(peer)).code == "slow_reader"


async def test_answer_over_the_frame_limits_becomes_an_error() -> None:
    """The step is answered and the link goes on."""
    link = StubLink()
    link.reading.set()
    link.refuses = StepResult
    peer = peer_over(link)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run(peer))
        peer.send(StepResult(session="s", step_index=4, epoch=2))
        await peer.flush()
        assert link.sent == [Error(code="payload_too_large", message="too large", session="s", step_index=4, epoch=2)]
        peer.give_up(LinkClosed("over", "the test is over"))
        await running


async def test_received_messages_are_handled_and_noted() -> None:
    """Each message is handed on at once and shows that the peer lives."""
    link, received = StubLink(), list[Message]()
    peer = peer_over(link, received)
    clock = peer._clock
    assert isinstance(clock, FakeClock)
    clock.jump(50)
    link.incoming.put_nowait(Heartbeat(seq=1))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run(peer))
        while not received:
            await asyncio.sleep(0)
        assert peer.heard_at == clock.monotonic()
        peer.give_up(LinkClosed("over", "the test is over"))
        await running


async def test_an_idle_link_is_sent_to_at_once_and_in_order() -> None:
    """Without waiting for a task; but never past a message that waits already."""
    link = StubLink()
    link.idle = True
    peer = peer_over(link)
    assert peer.send(Heartbeat(seq=1))
    assert link.sent == [Heartbeat(seq=1)]
    link.idle = False
    assert peer.send(Heartbeat(seq=2))
    link.idle = True
    assert peer.send(Heartbeat(seq=3))
    assert link.sent == [Heartbeat(seq=1)]
    link.reading.set()
    running = asyncio.create_task(peer.run())
    await peer.flush()
    assert link.sent == [Heartbeat(seq=1), Heartbeat(seq=2), Heartbeat(seq=3)]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_answer_over_the_limits_is_refused_on_an_idle_link_too() -> None:
    """The peer gets an error in its place, by way of the queue."""
    link = StubLink()
    link.idle = True
    link.refuses = StepResult
    link.reading.set()
    peer = peer_over(link)
    assert peer.send(StepResult(session="s", step_index=0))
    running = asyncio.create_task(peer.run())
    await peer.flush()
    assert [(message.kind, message.code) for message in link.sent if isinstance(message, Error)] == [
        ("error", "payload_too_large")
    ]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
