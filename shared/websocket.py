"""Frames over the `websockets` library: one transport for the side that dials and the side that listens.

Most frames are a few kilobytes and leave as one WebSocket frame. A long payload leaves as fragments cut
from the tensors' own buffers, so that a 100 MB prefill neither needs a second copy to be joined nor
fills the write buffer: each fragment waits until the one before has left.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus, InvalidURI
from websockets.protocol import State

from shared.errors import FrameError, LinkClosed
from shared.frame import DEFAULT_LIMITS, FrameLimits
from shared.link_state import HANDSHAKE_BYTES_MAX

JOINED_BYTES_MAX = 64 * 1024
"""Frames up to here are copied into one buffer: cheaper than a second WebSocket frame and its read."""
FRAGMENT_BYTES_MAX = 1024 * 1024
"""What is copied, masked and queued at once of a longer frame."""
WRITE_BUFFER_BYTES_MAX = 256 * 1024
"""Bytes that may wait for the socket before a sender waits too."""
RECEIVE_QUEUE_FRAMES_MAX = 32
"""WebSocket frames that may wait for the reader before the peer is made to wait."""
CLOSE_TIMEOUT_S = 1.0
"""How long a closing handshake may take before the socket is cut."""
CLOSE_REASON_BYTES_MAX = 123
"""RFC 6455, 5.5: a control frame holds 125 bytes, two of them the close code."""

_CLOSE_CODES = {1009: "frame_too_large", 1008: "refused", 1002: "protocol_error", 1001: "going_away"}


def websocket_options(limits: FrameLimits = DEFAULT_LIMITS) -> dict[str, Any]:
    """Keyword arguments that `websockets` takes for a link, whichever side it is.

    Compression is off (hidden states do not compress), and so are pings (our heartbeat carries more).
    """
    return {
        "compression": None,
        "max_size": limits.frame_bytes_max,
        "max_queue": RECEIVE_QUEUE_FRAMES_MAX,
        "write_limit": WRITE_BUFFER_BYTES_MAX,
        "ping_interval": None,
        "close_timeout": CLOSE_TIMEOUT_S,
    }


def listen_options(limits: FrameLimits = DEFAULT_LIMITS) -> dict[str, Any]:
    """Keyword arguments for `serve`: as `websocket_options`, and no browser may open a link.

    A browser lets any page dial any address, loopback included, but always names the page's origin. A
    link never has one.
    """
    return {**websocket_options(limits), "origins": [None]}


class WebSocketTransport:
    """A `shared.link.Transport` over one `websockets` connection, client's or server's.

    A server's connection receives at most `HANDSHAKE_BYTES_MAX` at once until `allow` is called: whoever
    can reach the port may otherwise make us buffer the longest frame there is before showing a token.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._long: asyncio.Future[None] | None = None
        if isinstance(connection, ServerConnection):
            self.allow(HANDSHAKE_BYTES_MAX)

    @property
    def has_certificate(self) -> bool:
        """Whether the peer has shown a certificate that this side's authorities have signed."""
        tls = self._connection.transport.get_extra_info("ssl_object")
        return tls is not None and bool(tls.getpeercert())

    def allow(self, frame_bytes_max: int) -> None:
        """Receive messages of up to this length from now on; longer ones close the connection."""
        self._connection.protocol.max_message_size = frame_bytes_max

    async def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send the pieces as one binary message; returns once the write buffer has room again.

        Messages leave in the order of the calls. Cancelling is safe: a long message that has begun to
        leave is sent to its end all the same, so its buffers must stay as they are.

        Raises:
            LinkClosed: The connection is closed.
        """
        while self._long is not None:
            await asyncio.wait({self._long})
        sending: Awaitable[None]
        if sum(map(len, pieces)) <= JOINED_BYTES_MAX:
            sending = self._connection.send(b"".join(pieces))
        else:
            self._long = asyncio.ensure_future(self._connection.send(cut_fragments(pieces)))
            self._long.add_done_callback(self._forget_long)
            sending = asyncio.shield(self._long)
        try:
            await sending
        except ConnectionClosed as error:
            raise _link_closed(error) from error

    def can_send_now(self) -> bool:
        """Whether the connection is open and everything sent before has left."""
        connection = self._connection
        return (
            self._long is None
            and connection.protocol.state is State.OPEN
            and not connection.transport.get_write_buffer_size()
        )

    def send_now(self, pieces: Sequence[bytes | memoryview]) -> None:
        """As `send` of a short message, without its waits; only directly after `can_send_now` has said so."""
        self._connection.protocol.send_binary(b"".join(pieces))
        self._connection.send_data()

    async def receive(self) -> bytes:
        """The next binary message, whole. Cancelling loses nothing.

        Raises:
            LinkClosed: The connection is closed.
            FrameError: `not_binary`.
        """
        try:
            data = await self._connection.recv()
        except ConnectionClosed as error:
            raise _link_closed(error) from error
        if isinstance(data, str):
            raise FrameError("not_binary", "a frame is a binary WebSocket message, got a text message")
        return data

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close; takes at most `CLOSE_TIMEOUT_S`. Closing again does nothing."""
        clipped = reason.encode(errors="replace")[:CLOSE_REASON_BYTES_MAX].decode(errors="ignore")
        await self._connection.close(code, clipped)

    def _forget_long(self, sent: asyncio.Future[None]) -> None:
        self._long = None
        if not sent.cancelled():
            sent.exception()  # its sender has it, unless it was cancelled and does not ask


def cut_fragments(pieces: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    """The same bytes in slices of at most `FRAGMENT_BYTES_MAX`, none empty, none copied."""
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), FRAGMENT_BYTES_MAX):
            yield view[start : start + FRAGMENT_BYTES_MAX]


class _Dial(connect):
    """Dials and follows nobody elsewhere: the token is for the address that was configured, and for no other."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        """A redirect is an answer like any other that is no peer's."""
        return exc


async def connect_websocket(
    url: str, limits: FrameLimits = DEFAULT_LIMITS, context: ssl.SSLContext | None = None
) -> WebSocketTransport:
    """Dial a node or a gateway. The caller bounds the time and closes what it gets.

    Args:
        url: Its address.
        limits: What is read of a frame.
        context: TLS of a ``wss://`` address; None trusts what the system trusts.

    Raises:
        LinkClosed: `bad_url`, `http_status` (something answered that is no meshnet peer), `bad_certificate` (its
            certificate is not one that is trusted, or of another host), `unreachable`.
    """
    secure: dict[str, Any] = {"ssl": context} if context is not None and url.startswith("wss:") else {}
    proxy: Literal[True] | None = None if is_loopback(url) else True
    try:
        connection: ClientConnection = await _Dial(
            url, open_timeout=None, proxy=proxy, **secure, **websocket_options(limits)
        )
    except InvalidURI as error:
        raise LinkClosed("bad_url", f"{url} is not a ws:// or wss:// address") from error
    except InvalidStatus as error:
        status = error.response.status_code
        raise LinkClosed("http_status", f"{url} answered with HTTP {status}", status=status) from error
    except ssl.SSLCertVerificationError as error:
        raise LinkClosed("bad_certificate", f"{url} is not trusted: {error.verify_message}") from error
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise LinkClosed("unreachable", f"{url} cannot be reached: {reason}") from error
    return WebSocketTransport(connection)


def _link_closed(error: ConnectionClosed) -> LinkClosed:
    """Our error for a closed connection: by the code that the peer gave, or else the one we gave."""
    close = error.rcvd or error.sent
    if close is None:
        return LinkClosed("connection_lost", "the connection was lost")
    code = _CLOSE_CODES.get(close.code, "link_closed")
    return LinkClosed(code, f"the connection was closed: {close.reason or close.code}", close_code=close.code)


def is_loopback(url: str) -> bool:
    """Whether an address stays on this machine, where a proxy from the environment has no business."""
    host = urlsplit(url).hostname or ""
    return host in {"localhost", "::1"} or host.startswith("127.")
