"""The asyncio shell: handshakes, what each side sees of the other's faults, bounded waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shared.errors import (
    DeadlineExceeded,
    FrameError,
    HandshakeRefused,
    LinkClosed,
    LocalProtocolError,
    RemoteProtocolError,
)
from shared.frame import FrameLimits, encode_frame
from shared.handshake import VERSIONS, check_hello
from shared.layers import LayerRange
from shared.link import CLOSE_PROTOCOL_ERROR, CLOSE_REFUSED, Link, accept, dial_over
from shared.link_state import LinkState
from shared.messages import Drain, Error, Heartbeat, Hello, NodeInfo, Refused, Step, Unsupported, Welcome
from shared.tensor_spec import WireTensor
from tests.support.fake_clock import FakeClock
from tests.support.memory_link import MEMORY_FRAMES_MAX, create_memory_links, create_memory_pair

HELLO = Hello(versions=VERSIONS, role="gateway", peer="gateway", token="right", model="m1")
NODE = NodeInfo(node="n1", model="m1", layers=LayerRange(0, 2), num_layers=4)
WELCOME = Welcome(version=1, peer="n1", node=NODE)
STEP = Step(session="s", step_index=0, layers=LayerRange(0, 2), model="m1")


def strict_answer(hello: Hello) -> Welcome | Refused:
    """An acceptor with a token and a model."""
    return check_hello(hello, tokens=["right"], model="m1") or WELCOME


async def shake(
    hello: Hello, answer: Callable[[Hello], Welcome | Refused]
) -> tuple[Link | BaseException, Link | BaseException]:
    """What dialling and accepting came to, on each side."""
    near, far = create_memory_pair()
    dialled, accepted = await asyncio.gather(dial_over(near, hello), accept(far, answer=answer), return_exceptions=True)
    return dialled, accepted


async def test_handshake_tells_each_side_who_the_other_is():
    """Both links hold hello and welcome; `peer` and `peer_node` are the other side's."""
    dialled, accepted = await shake(HELLO, strict_answer)
    assert isinstance(dialled, Link)
    assert isinstance(accepted, Link)
    assert (dialled.peer, dialled.peer_node, dialled.welcome) == ("n1", NODE, WELCOME)
    assert (accepted.peer, accepted.peer_node, accepted.hello) == ("gateway", None, HELLO)
    assert dialled.state is accepted.state is LinkState.OPEN


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (Hello(versions=(1,), role="gateway", peer="g", token="wrong"), "unauthorized"),
        (Hello(versions=(1,), role="gateway", peer="g"), "unauthorized"),
        (Hello(versions=(2, 3), role="gateway", peer="g", token="right"), "version_mismatch"),
        (Hello(versions=(1,), role="gateway", peer="g", token="right", model="m2"), "model_mismatch"),
    ],
)
async def test_a_refusal_reaches_both_sides(hello: Hello, code: str):
    """The dialer and the acceptor both raise `HandshakeRefused` with the acceptor's code."""
    for outcome in await shake(hello, strict_answer):
        assert isinstance(outcome, HandshakeRefused)
        assert outcome.code == code


@pytest.mark.parametrize(
    ("welcome", "code"),
    [
        (Welcome(version=2, peer="n1"), "version_mismatch"),
        (Welcome(version=1, peer="n1", node=NodeInfo(node="n1", model="m9", layers=LayerRange(0, 2), num_layers=2)),
         "model_mismatch"),
    ],
)  # fmt: skip
async def test_a_dialer_refuses_an_answer_it_cannot_use(welcome: Welcome, code: str):
    """A version it did not offer and a model it did not ask for close the link."""
    near, far = create_memory_pair()
    outcome, accepted = await asyncio.gather(
        dial_over(near, HELLO), accept(far, answer=lambda _: welcome), return_exceptions=True
    )
    assert isinstance(outcome, HandshakeRefused)
    assert outcome.code == code
    assert near.closed_with == (CLOSE_REFUSED, code)
    assert isinstance(accepted, Link)
    with pytest.raises(LinkClosed):
        await accepted.receive()


async def test_a_silent_dialer_is_given_up():
    """An acceptor waits for `Hello` no longer than its deadline, then closes."""
    near, far = create_memory_pair()
    with pytest.raises(DeadlineExceeded):
        await accept(far, answer=strict_answer, timeout_s=0.01)
    with pytest.raises(LinkClosed):
        await near.receive()


async def test_a_silent_acceptor_is_given_up():
    """A dialer waits for the answer no longer than its deadline, then closes."""
    near, far = create_memory_pair()
    with pytest.raises(DeadlineExceeded):
        await dial_over(near, HELLO, timeout_s=0.01)
    assert await far.receive()
    with pytest.raises(LinkClosed):
        await far.receive()


async def test_an_answer_that_raises_closes_the_transport():
    """Our own fault in `answer` passes through, and the dialer is not left waiting."""

    def broken(_hello: Hello) -> Welcome:
        raise ZeroDivisionError

    dialled, accepted = await shake(HELLO, broken)
    assert isinstance(accepted, ZeroDivisionError)
    assert isinstance(dialled, LinkClosed)


async def test_messages_travel_with_their_tensors():
    """What is sent arrives equal, and both sides count it by kind."""
    dialled, accepted, _, _ = await create_memory_links()
    tensor = WireTensor("f32", (1, 1, 2), memoryview(bytes(range(8))))
    await dialled.send(STEP, {"hidden_states": tensor})
    message, tensors = await accepted.receive()
    assert message == STEP
    assert tensors == {"hidden_states": tensor}
    assert dialled.counters.sent_frames["step"] == accepted.counters.received_frames["step"] == 1
    assert dialled.counters.sent_bytes["step"] == accepted.counters.received_bytes["step"] == 64 * 3 + 8


async def test_unknown_kinds_are_answered_and_skipped():
    """A newer peer's message gets `Unsupported`; the next one is received as if nothing had been."""
    dialled, accepted, near, _ = await create_memory_links()
    await near.send(encode_frame({"kind": "teleport", "session": "s"}))
    await dialled.send(Heartbeat(seq=7))
    assert (await accepted.receive())[0] == Heartbeat(seq=7)
    assert (await dialled.receive())[0] == Unsupported(unsupported="teleport")
    assert accepted.counters.received_frames["unknown"] == accepted.counters.sent_frames["unsupported"] == 1


@pytest.mark.parametrize(
    ("garbage", "code"),
    [
        (b"", "truncated"),
        (b"GET / HTTP/1.1\r\n\r\n", "bad_magic"),
        (b"MSHN\x02\0\0\0\0\0\0\0", "unsupported_version"),
        (b"MSHN\x01\0\0\0\x02\0\0\0{}", "bad_message"),
    ],
)
async def test_garbage_ends_the_link_on_both_sides_with_a_code(garbage: bytes, code: str):
    """The receiver raises the typed error and tells the sender, whose next receive raises the same code."""
    dialled, accepted, near, far = await create_memory_links()
    await near.send([garbage])
    with pytest.raises(FrameError) as caught:
        await accepted.receive()
    assert caught.value.code == code
    assert far.closed_with == (CLOSE_PROTOCOL_ERROR, code)
    with pytest.raises(LinkClosed) as told:
        await dialled.receive()
    assert told.value.code == code
    for link in (dialled, accepted):
        assert link.state is LinkState.CLOSED
        with pytest.raises(LinkClosed):
            await link.send(Heartbeat(seq=1))


async def test_a_second_hello_is_a_protocol_error():
    """The state table decides, on the sending side before anything leaves and on the receiving side."""
    dialled, accepted, near, _ = await create_memory_links()
    with pytest.raises(LocalProtocolError):
        await dialled.send(HELLO)
    await near.send(encode_frame({"kind": "hello", "versions": [1], "role": "node", "peer": "x"}))
    with pytest.raises(RemoteProtocolError) as caught:
        await accepted.receive()
    assert caught.value.code == "unexpected_message"


async def test_draining_is_seen_by_both_sides():
    """After `drain` both links say so and still carry what lives on."""
    dialled, accepted, _, _ = await create_memory_links()
    await accepted.send(Drain())
    await dialled.receive()
    assert dialled.state is accepted.state is LinkState.DRAINING
    await dialled.send(STEP)
    assert (await accepted.receive())[0] == STEP


async def test_an_error_about_a_step_leaves_the_link_open():
    """Only an `Error` without a session is about the link."""
    dialled, accepted, _, _ = await create_memory_links()
    error = Error(code="bad_step", session="s", step_index=0)
    await accepted.send(error)
    assert (await dialled.receive())[0] == error
    assert dialled.state is LinkState.OPEN


async def test_a_cut_connection_wakes_the_reader():
    """Whoever waits for a message gets `LinkClosed` at once."""
    dialled, _, near, _ = await create_memory_links()
    waiting = asyncio.create_task(dialled.receive())
    await asyncio.sleep(0)
    await near.cut()
    with pytest.raises(LinkClosed) as caught:
        await waiting
    assert caught.value.code == "connection_lost"


async def test_closing_twice_does_nothing():
    """`close` may be called by whoever notices first, and again by whoever cleans up."""
    dialled, accepted, near, _ = await create_memory_links()
    await dialled.close(reason="done")
    await dialled.close(reason="again")
    assert near.closed_with == (1000, "done")
    with pytest.raises(LinkClosed):
        await accepted.receive()


async def test_an_overlong_message_fails_where_it_is_made():
    """A sender keeps within its own limits; the link stays open."""
    near, far = create_memory_pair()
    limits = FrameLimits(payload_bytes_max=100)
    dialled, accepted = await asyncio.gather(
        dial_over(near, HELLO, limits=limits), accept(far, answer=strict_answer, limits=limits)
    )
    with pytest.raises(FrameError) as caught:
        await dialled.send(STEP, {"x": WireTensor("u8", (101,), memoryview(bytes(101)))})
    assert caught.value.code == "payload_too_large"
    with pytest.raises(ValueError, match=r"Heartbeat\.seq"):
        await dialled.send(Heartbeat(seq=-1))
    await dialled.send(Heartbeat(seq=1))
    assert (await accepted.receive())[0] == Heartbeat(seq=1)


async def test_a_peer_that_does_not_read_makes_its_sender_wait():
    """Nothing piles up without bound: at the transport's limit `send` waits, and a cancelled one is harmless."""
    dialled, accepted, _, _ = await create_memory_links()
    for seq in range(MEMORY_FRAMES_MAX):
        await dialled.send(Heartbeat(seq=seq))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await dialled.send(Heartbeat(seq=999))
    await accepted.receive()
    await dialled.send(Heartbeat(seq=1000))


async def test_the_memory_link_delays_drops_and_duplicates():
    """The test support does to frames what the test says, in order and by the test's clock."""
    clock = FakeClock()
    dialled, accepted, near, _ = await create_memory_links(clock=clock)
    fates = iter([(), (0.5, 0.5), (0.0,)])
    near.outgoing.faults = lambda _frame: next(fates)
    for seq in (1, 2, 3):
        await dialled.send(Heartbeat(seq=seq))
    received: list[int] = []

    async def read() -> None:
        while True:
            message, _ = await accepted.receive()
            assert isinstance(message, Heartbeat)
            received.append(message.seq)

    reading = asyncio.create_task(read())
    await clock.advance(0.4)
    assert received == []
    await clock.advance(0.2)
    assert received == [2, 2, 3]
    reading.cancel()
