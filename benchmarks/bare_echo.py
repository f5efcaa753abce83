"""The least a hop can cost on this machine: bare TCP, one hand-over to a thread and back, no protocol at all.

The thread sleeps as long as a stage would compute, since waking an idle core is most of what there is to pay.
Run as a process: ``python -m benchmarks.bare_echo PORT FRAME_BYTES SLEEP_US``.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import cast

import uvloop


class Collect(asyncio.Protocol):
    """Calls back with each `frame_bytes` received."""

    def __init__(self, frame_bytes: int, take: Callable[[asyncio.Transport, bytes], None]) -> None:
        self._frame_bytes = frame_bytes
        self._take = take
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport to answer on."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Gather a whole frame."""
        self._buffer += data
        if len(self._buffer) >= self._frame_bytes:
            frame = bytes(self._buffer)
            self._buffer.clear()
            self._take(self._transport, frame)


async def serve(port: int, frame_bytes: int, sleep_s: float) -> None:
    """Answer every frame with itself, from a thread that slept."""
    loop = asyncio.get_running_loop()
    waiting: queue.SimpleQueue[tuple[asyncio.Transport, bytes]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            transport, frame = waiting.get()
            time.sleep(sleep_s)
            loop.call_soon_threadsafe(transport.write, frame)

    threading.Thread(target=work, daemon=True).start()
    protocol = lambda: Collect(frame_bytes, lambda transport, frame: waiting.put((transport, frame)))  # noqa: E731
    server = await loop.create_server(protocol, "127.0.0.1", port)
    await server.serve_forever()


async def measure(port: int, frame_bytes: int, rounds: int) -> list[float]:
    """Seconds of each round trip, the sleep included."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[bytes] = loop.create_future()

    def take(_: asyncio.Transport, frame: bytes) -> None:
        answered.set_result(frame)

    while True:
        try:
            transport, _ = await loop.create_connection(lambda: Collect(frame_bytes, take), "127.0.0.1", port)
            break
        except OSError:
            await asyncio.sleep(0.05)
    took_s = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        transport.write(bytes(frame_bytes))
        await answered
        took_s.append(time.perf_counter() - started_s)
        answered = loop.create_future()
    transport.close()
    return took_s


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) / 1e6))
