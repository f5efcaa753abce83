"""Sends a response's parts, and does not wait for ever for a client that does not read them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from litestar.types import Send

from gateway.edge import send_whole
from gateway.request_record import ClientLeft
from shared.clock import Clock

STREAM_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
"""No length, no compression, and no proxy that waits for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """How long a stream may be silent on either side.

    Args:
        keep_alive_s: A comment is sent after this much silence of ours. Longer than a new call waits for a route,
            so that a missing one is a response of its own.
        stall_s: A client that takes nothing for this long has left.
    """

    keep_alive_s: float = 10.0
    stall_s: float = 60.0


class ResponseWriter:
    """Writes one response.

    Args:
        send: ASGI's.
        stall_s: How long a client may take nothing.
        clock: Time.
    """

    def __init__(self, send: Send, stall_s: float, clock: Clock) -> None:
        self._send = send
        self._stall_s = stall_s
        self._clock = clock
        self._sent_s = clock.monotonic()
        self.started = False

    @property
    def quiet_s(self) -> float:
        """Seconds since something was sent."""
        return self._clock.monotonic() - self._sent_s

    async def write(self, frames: bytes, *, last: bool = False) -> None:
        """Send frames of a stream, after its headers if they are the first.

        Raises:
            ClientLeft: If the client has taken nothing for too long.
        """
        if not frames:
            return
        try:
            async with asyncio.timeout(self._stall_s):
                if not self.started:
                    self.started = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                await self._send({"type": "http.response.body", "body": frames, "more_body": not last})
        except TimeoutError as error:
            raise ClientLeft("stalled") from error
        self._sent_s = self._clock.monotonic()

    async def write_whole(self, body: bytes) -> None:
        """Send a JSON response."""
        self.started = True
        await send_whole(self._send, 200, body, [])
