"""Frames over the `websockets` library: one transport for the side that dials and the side that listens.

Most frames are a few kilobytes and leave as one WebSocket frame. A long payload leaves as fragments cut
from the tensors' own buffers, so that a 100 MB prefill neither needs a second copy to be joined nor
fills the write buffer: each fragment waits until the one before has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed, InvalidStatus, InvalidURI, WebSocketException

from shared.errors import FrameError, LinkClosed
from shared.frame import DEFAULT_LIMITS, FrameLimits

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
    """Keyword arguments that `websockets` `connect` and `serve` take for a link.

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


class WebSocketTransport:
    """A `shared.link.Transport` over one `websockets` connection, client's or server's."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unfinished: set[asyncio.Task[None]] = set()

    async def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send the pieces as one binary message; returns once the write buffer has room again.

        Cancelling is safe: a message of which a part has left is sent to its end all the same.

        Raises:
            LinkClosed: The connection is closed.
        """
        if sum(map(len, pieces)) > JOINED_BYTES_MAX:
            await self._send_long(pieces)
            return
        try:
            await self._connection.send(b"".join(pieces))
        except ConnectionClosed as error:
            raise _link_closed(error) from error

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

    async def _send_long(self, pieces: Sequence[bytes | memoryview]) -> None:
        sending = asyncio.ensure_future(self._connection.send(cut_fragments(pieces)))
        self._unfinished.add(sending)
        sending.add_done_callback(self._forget)
        try:
            await asyncio.shield(sending)
        except ConnectionClosed as error:
            raise _link_closed(error) from error

    def _forget(self, sending: asyncio.Task[None]) -> None:
        self._unfinished.discard(sending)
        if not sending.cancelled():
            sending.exception()  # the sender has seen it, or was cancelled and does not ask


def cut_fragments(pieces: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    """The same bytes in slices of at most `FRAGMENT_BYTES_MAX`, none empty, none copied."""
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), FRAGMENT_BYTES_MAX):
            yield view[start : start + FRAGMENT_BYTES_MAX]


async def connect_websocket(url: str, limits: FrameLimits = DEFAULT_LIMITS) -> WebSocketTransport:
    """Dial a node or a gateway. The caller bounds the time and closes what it gets.

    Raises:
        LinkClosed: `bad_url`, `http_status` (something answered that is no meshnet peer), `unreachable`.
    """
    proxy: Literal[True] | None = None if is_loopback(url) else True
    try:
        connection: ClientConnection = await connect(url, open_timeout=None, proxy=proxy, **websocket_options(limits))
    except InvalidURI as error:
        raise LinkClosed("bad_url", f"{url} is not a ws:// or wss:// address") from error
    except InvalidStatus as error:
        status = error.response.status_code
        raise LinkClosed("http_status", f"{url} answered with HTTP {status}", status=status) from error
    except (OSError, WebSocketException) as error:
        raise LinkClosed("unreachable", f"{url} cannot be reached: {error}") from error
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
