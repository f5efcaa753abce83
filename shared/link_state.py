"""The link's protocol without its I/O: bytes in, an event out; a message in, the bytes to send out.

Theory of operation
-------------------

A link is one WebSocket between two sides. The *dialer* opened it, the *acceptor* was called; which of
them is a gateway and which a node makes no difference here. Both sides run the same table,
`TRANSITIONS`: it maps (state, who sends, what is sent) to the next state, and both sides apply it to
what they send as to what they receive. So the two tables cannot disagree, and there is one rule:

    **a missing key is the protocol error.** Of the sending side it is a `LocalProtocolError` and
    nothing is sent; of the receiving side it is a `RemoteProtocolError`, answered with an `Error`
    frame and the end of the link.

The states::

                dialer: hello               acceptor: welcome
      NEW ─────────────────────▶ OFFERED ─────────────────────▶ OPEN ⟲ every message of `WORK`
                                    │                             │ drain, by either side
                                    │ acceptor: refused           ▼
                                    ▼                          DRAINING ⟲ every message of `WORK`, drain
      any ───────────────────▶ CLOSED
           an `Error` about the link, by either side; the transport's end

What is sent is named by its kind, with one exception: an `Error` without a session is not about a step
but about the link, and is the last thing that side says; it is called `LINK_ERROR` here.

DRAINING allows what OPEN allows: sessions that live on a node which is leaving go on until they end or
are rebuilt elsewhere. It is a state so that either side can ask whether the other is leaving.

An unknown kind in OPEN or DRAINING is no error: it is answered with `Unsupported`, so that a newer peer
may try what an older one does not know. Before OPEN nobody has shown a token yet, and it is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from shared.errors import FrameError, LinkClosed, LocalProtocolError, MeshError, RemoteProtocolError
from shared.frame import DEFAULT_LIMITS, Frame, FrameLimits, decode_frame, encode_frame
from shared.messages import (
    MESSAGE_TYPES,
    Error,
    Hello,
    Message,
    UnknownKind,
    Unsupported,
    Welcome,
    decode_header,
    encode_header,
)
from shared.tensor_spec import WireTensor

Role = Literal["dialer", "acceptor"]
Pieces = list[bytes | memoryview]

HANDSHAKE_BYTES_MAX = 64 * 1024
"""The longest frame looked at before the peer has shown its token: a `Hello` with a node's description."""
REASON_CHARS_MAX = 500
"""How much of its own sentence a side that gives up puts on the wire: it may quote what the peer sent."""


class LinkState(Enum):
    """Where a link is in its life."""

    NEW = "new"
    OFFERED = "offered"
    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


LINK_ERROR = "error (link)"
HANDSHAKE = frozenset({"hello", "welcome", "refused"})
WORK = frozenset(MESSAGE_TYPES) - HANDSHAKE - {"drain"}
_WORKING = (LinkState.OPEN, LinkState.DRAINING)
_ROLES: tuple[Role, Role] = ("dialer", "acceptor")

TRANSITIONS: dict[tuple[LinkState, Role, str], LinkState] = {
    (LinkState.NEW, "dialer", "hello"): LinkState.OFFERED,
    (LinkState.OFFERED, "acceptor", "welcome"): LinkState.OPEN,
    (LinkState.OFFERED, "acceptor", "refused"): LinkState.CLOSED,
    **{(state, role, kind): state for state in _WORKING for role in _ROLES for kind in WORK},
    **{(state, role, "drain"): LinkState.DRAINING for state in _WORKING for role in _ROLES},
    **{
        (state, role, LINK_ERROR): LinkState.CLOSED
        for state in LinkState
        if state is not LinkState.CLOSED
        for role in _ROLES
    },
}


@dataclass(frozen=True, slots=True)
class Received:
    """A message that the state allows, for whoever uses the link."""

    message: Message
    tensors: dict[str, WireTensor]


@dataclass(frozen=True, slots=True)
class Unanswerable:
    """A frame of an unknown kind: send `reply` and go on."""

    kind: str
    reply: Pieces


@dataclass(frozen=True, slots=True)
class Broken:
    """The link is over: send `reply`, if there is one, close the transport and raise `error`."""

    error: MeshError
    reply: Pieces | None


Event = Received | Unanswerable | Broken


class LinkProtocol:
    """One side of one link.

    Whoever owns it moves the bytes: `send` gives the pieces of one binary WebSocket message, `receive`
    takes one such message whole and gives the one event it amounts to.

    Args:
        role: Which side this is.
        limits: What this side is willing to receive; it sends within them too.
    """

    def __init__(self, role: Role, limits: FrameLimits = DEFAULT_LIMITS) -> None:
        self.role = role
        self.limits = limits
        self.state = LinkState.NEW
        self.hello: Hello | None = None
        self.welcome: Welcome | None = None
        self._peer_role: Role = "acceptor" if role == "dialer" else "dialer"

    def send(self, message: Message, tensors: Mapping[str, WireTensor] | None = None) -> Pieces:
        """The bytes of a message, after moving to the state that sending it leads to.

        Raises:
            LinkClosed: The link is over.
            LocalProtocolError: `unexpected_message`, the state does not allow it. Nothing has changed.
            FrameError: The message is over the limits. Nothing has changed.
            ValueError: A field's value could not be read by any receiver. Nothing has changed.
        """
        state = self._next_state(self.role, message)
        if state is None:
            if self.state is LinkState.CLOSED:
                raise LinkClosed("link_closed", "the link is closed")
            raise LocalProtocolError("unexpected_message", self._refusal(self.role, _name_of(message)))
        pieces = encode_frame(encode_header(message), tensors, self.limits)
        self._enter(state, message)
        return pieces

    def receive(self, data: bytes | bytearray | memoryview) -> Event:
        """What one binary WebSocket message amounts to. Nothing it holds makes this raise."""
        if self.state is LinkState.CLOSED:
            return Broken(LinkClosed("link_closed", "the link is closed"), None)
        try:
            self._check_handshake_size(data)
            frame = decode_frame(data, self.limits)
            return self._receive_message(decode_header(frame.header), frame)
        except UnknownKind as unknown:
            return self._answer_unknown(unknown.kind)
        except (FrameError, RemoteProtocolError) as error:
            return self.fail(error)

    def fail(self, error: MeshError) -> Broken:
        """Give the link up because of what the peer sent; the reply tells it why."""
        if self.state is LinkState.CLOSED:
            return Broken(error, None)
        try:
            reply = self.send(Error(code=error.code, message=error.message[:REASON_CHARS_MAX]))
        except FrameError:  # limits so small that they leave no room to say why
            self.close()
            return Broken(error, None)
        return Broken(error, reply)

    def close(self) -> None:
        """The transport is gone, or about to be: nothing may be sent or received any more."""
        self.state = LinkState.CLOSED

    def _answer_unknown(self, kind: str) -> Event:
        if self.state not in _WORKING:
            return self.fail(RemoteProtocolError("unexpected_message", self._refusal(self._peer_role, "unknown kind")))
        try:
            return Unanswerable(kind, self.send(Unsupported(unsupported=kind)))
        except FrameError as error:
            return self.fail(error)

    def _receive_message(self, message: Message, frame: Frame) -> Event:
        state = self._next_state(self._peer_role, message)
        if state is None:
            raise RemoteProtocolError("unexpected_message", self._refusal(self._peer_role, _name_of(message)))
        self._enter(state, message)
        if isinstance(message, Error) and message.session is None:
            return Broken(LinkClosed(message.code, f"the peer gave the link up: {message.message}"), None)
        return Received(message, frame.tensors)

    def _next_state(self, sender: Role, message: Message) -> LinkState | None:
        return TRANSITIONS.get((self.state, sender, _name_of(message)))

    def _enter(self, state: LinkState, message: Message) -> None:
        self.state = state
        if isinstance(message, Hello):
            self.hello = message
        elif isinstance(message, Welcome):
            self.welcome = message

    def _check_handshake_size(self, data: bytes | bytearray | memoryview) -> None:
        if self.state not in _WORKING and len(data) > HANDSHAKE_BYTES_MAX:
            raise FrameError(
                "handshake_too_large",
                f"handshake frame bytes: {len(data)} is over the limit of {HANDSHAKE_BYTES_MAX}",
                value=len(data),
                limit=HANDSHAKE_BYTES_MAX,
            )

    def _refusal(self, sender: Role, name: str) -> str:
        return f"{name} from the {sender} is not allowed while the link is {self.state.value}"


def _name_of(message: Message) -> str:
    if isinstance(message, Error) and message.session is None:
        return LINK_ERROR
    return message.kind
