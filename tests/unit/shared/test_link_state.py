"""The state table: what is in it is allowed on both sides, what is not is an error on both."""

from __future__ import annotations

from itertools import product

import pytest

from shared.errors import FrameError, LinkClosed, LocalProtocolError, RemoteProtocolError
from shared.frame import FrameLimits, decode_frame, encode_frame
from shared.layers import LayerRange
from shared.link_state import (
    HANDSHAKE,
    HANDSHAKE_BYTES_MAX,
    LINK_ERROR,
    REASON_CHARS_MAX,
    TRANSITIONS,
    Broken,
    LinkProtocol,
    LinkState,
    Received,
    Role,
    Unanswerable,
)
from shared.messages import (
    MESSAGE_TYPES,
    CacheMiss,
    Cancel,
    Drain,
    Error,
    Fork,
    Heartbeat,
    Hello,
    Load,
    Loaded,
    LoadProgress,
    Message,
    NodeInfo,
    Probe,
    Refused,
    Release,
    Step,
    StepResult,
    Unload,
    Unsupported,
    Welcome,
    decode_header,
)

NODE = NodeInfo(node="n", model="m", layers=LayerRange(0, 1), num_layers=1)
SAMPLES: dict[str, Message] = {
    "hello": Hello(versions=(1,), role="gateway", peer="g"),
    "welcome": Welcome(version=1, peer="n"),
    "refused": Refused(code="unauthorized"),
    "load": Load(layers=LayerRange(0, 1), model="m", num_layers=1),
    "unload": Unload(),
    "load_progress": LoadProgress(done_bytes=1, total_bytes=2),
    "loaded": Loaded(node=NODE),
    "step": Step(session="s", step_index=0, layers=LayerRange(0, 1), model="m"),
    "step_result": StepResult(session="s", step_index=0),
    "cache_miss": CacheMiss(session="s", step_index=0, reason="unknown"),
    "error": Error(code="bad_step", session="s"),
    LINK_ERROR: Error(code="overloaded"),
    "fork": Fork(session="s", target="t", past_len=1, layers=LayerRange(0, 1), model="m"),
    "release": Release(session="s"),
    "cancel": Cancel(session="s"),
    "heartbeat": Heartbeat(seq=1),
    "probe": Probe(seq=1),
    "drain": Drain(),
    "unsupported": Unsupported(unsupported="x"),
}
STATES = tuple(LinkState)
ROLES: tuple[Role, Role] = ("dialer", "acceptor")


def in_state(role: Role, state: LinkState) -> LinkProtocol:
    """One side, put into a state."""
    protocol = LinkProtocol(role)
    protocol.state = state
    return protocol


def bytes_of(message: Message) -> bytes:
    """A message as the peer would send it."""
    protocol = in_state("dialer", LinkState.NEW if message.kind == "hello" else LinkState.OPEN)
    if message.kind in {"welcome", "refused"}:
        protocol = in_state("acceptor", LinkState.OFFERED)
    return b"".join(protocol.send(message))


def test_there_is_a_sample_of_every_kind():
    """The tests below cover every message there is."""
    assert set(SAMPLES) == {*MESSAGE_TYPES, LINK_ERROR}


@pytest.mark.parametrize(("state", "role", "name"), list(product(STATES, ROLES, SAMPLES)))
def test_both_sides_obey_the_same_table(state: LinkState, role: Role, name: str):
    """For every state, sender and message: a key leads both sides to its state, a missing key is an error on both."""
    sender = in_state(role, state)
    receiver = in_state("acceptor" if role == "dialer" else "dialer", state)
    expected = TRANSITIONS.get((state, role, name))
    event = receiver.receive(bytes_of(SAMPLES[name]))
    if expected is None:
        with pytest.raises(LinkClosed if state is LinkState.CLOSED else LocalProtocolError):
            sender.send(SAMPLES[name])
        assert sender.state is state
        assert isinstance(event, Broken)
        assert isinstance(event.error, LinkClosed if state is LinkState.CLOSED else RemoteProtocolError)
        assert receiver.state is LinkState.CLOSED
    else:
        sender.send(SAMPLES[name])
        assert sender.state is receiver.state is expected
        assert isinstance(event, Broken if name == LINK_ERROR else Received)


def test_the_table_opens_only_through_the_handshake():
    """No key leads into OPEN but `welcome`, and handshake messages appear nowhere else."""
    opening = {key for key, state in TRANSITIONS.items() if state is LinkState.OPEN and key[0] is not LinkState.OPEN}
    assert opening == {(LinkState.OFFERED, "acceptor", "welcome")}
    assert {key[0] for key in TRANSITIONS if key[2] in HANDSHAKE} == {LinkState.NEW, LinkState.OFFERED}


def test_hello_and_welcome_are_kept_by_both_sides():
    """Either side can later say what was agreed."""
    dialer, acceptor = LinkProtocol("dialer"), LinkProtocol("acceptor")
    acceptor.receive(b"".join(dialer.send(SAMPLES["hello"])))
    dialer.receive(b"".join(acceptor.send(SAMPLES["welcome"])))
    assert dialer.hello == acceptor.hello == SAMPLES["hello"]
    assert dialer.welcome == acceptor.welcome == SAMPLES["welcome"]


@pytest.mark.parametrize("state", [LinkState.OPEN, LinkState.DRAINING])
def test_an_unknown_kind_is_answered_and_changes_nothing(state: LinkState):
    """A newer peer may try; it learns the kind is not supported here."""
    protocol = in_state("acceptor", state)
    event = protocol.receive(b"".join(encode_frame({"kind": "k" * 1000, "anything": [1, {"a": None}]})))
    assert isinstance(event, Unanswerable)
    assert decode_header(decode_frame(b"".join(event.reply)).header) == Unsupported(unsupported="k" * 64)
    assert protocol.state is state


@pytest.mark.parametrize("state", [LinkState.NEW, LinkState.OFFERED])
def test_an_unknown_kind_before_the_handshake_ends_the_link(state: LinkState):
    """Who has not shown a token may not try things."""
    event = in_state("acceptor", state).receive(b"".join(encode_frame({"kind": "teleport"})))
    assert isinstance(event, Broken)
    assert event.error.code == "unexpected_message"


@pytest.mark.parametrize("state", [LinkState.NEW, LinkState.OFFERED])
def test_a_long_frame_before_the_handshake_ends_the_link(state: LinkState):
    """A frame over `HANDSHAKE_BYTES_MAX` is not even parsed; one of exactly that length is."""
    protocol = in_state("acceptor", state)
    event = protocol.receive(bytes(HANDSHAKE_BYTES_MAX + 1))
    assert isinstance(event, Broken)
    assert event.error.code == "handshake_too_large"
    event = in_state("acceptor", state).receive(bytes(HANDSHAKE_BYTES_MAX))
    assert isinstance(event, Broken)
    assert event.error.code == "bad_magic"


def test_a_failure_tells_the_peer_its_code_and_a_clipped_sentence():
    """The reply is an `Error` about the link, however long the sentence is, and the last thing said."""
    protocol = in_state("dialer", LinkState.OPEN)
    event = protocol.fail(FrameError("bad_header", "x" * 10_000))
    assert event.reply is not None
    reply = decode_header(decode_frame(b"".join(event.reply)).header)
    assert reply == Error(code="bad_header", message="x" * REASON_CHARS_MAX)
    assert protocol.fail(FrameError("bad_header", "again")).reply is None
    with pytest.raises(LinkClosed):
        protocol.send(SAMPLES["heartbeat"])


def test_a_failure_within_tiny_limits_still_ends_the_link():
    """Where even the reply is over the limits there is none, and the error is the one that counted."""
    protocol = LinkProtocol("acceptor", FrameLimits(header_bytes_max=10))
    event = protocol.receive(b"garbage garbage garbage")
    assert isinstance(event, Broken)
    assert event.error.code == "bad_magic"
    assert event.reply is None
    assert protocol.state is LinkState.CLOSED


def test_what_fails_to_send_changes_nothing():
    """A `drain` that could not be encoded has not drained the link."""
    protocol = LinkProtocol("acceptor", FrameLimits(header_bytes_max=10))
    protocol.state = LinkState.OPEN
    with pytest.raises(FrameError):
        protocol.send(Drain())
    assert protocol.state is LinkState.OPEN
