"""A TCP proxy on loopback that delays, throttles, stalls or cuts what passes, for tests between real processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Literal

Way = Literal["there", "back"]
"""`there` is from whoever dialled the proxy to the target, `back` the other way."""
Chunks = asyncio.Queue[tuple[float, bytes]]
"""What has been read, each with the loop's time from which it may be passed on; empty is the end."""
READ_BYTES_MAX = 64 * 1024
CHUNKS_IN_FLIGHT_MAX = 256
"""Delayed chunks that the proxy holds of each connection and way before it stops reading."""


class LinkProxy:
    """Passes bytes between whoever connects to `port` and the target, under the test's orders.

    Args:
        target_port: Where the real listener is.
        target_host: On which host.
        host: Where the proxy listens.
        port: 0 lets the system choose.

    `heard` keeps every byte that passes once it is given two empty arrays.
    """

    def __init__(
        self, target_port: int, *, target_host: str = "127.0.0.1", host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.target_host, self.target_port = target_host, target_port
        self.host, self.port = host, port
        self.connections = 0
        self.delay_s: dict[Way, float] = {"there": 0.0, "back": 0.0}
        self.bytes_per_s: dict[Way, float] = {"there": float("inf"), "back": float("inf")}
        self.passed_bytes: dict[Way, int] = {"there": 0, "back": 0}
        self.heard: dict[Way, bytearray] | None = None
        self.refusing = False
        self._open: dict[Way, asyncio.Event] = {"there": asyncio.Event(), "back": asyncio.Event()}
        self._writers: set[asyncio.StreamWriter] = set()
        self.heal()

    @property
    def url(self) -> str:
        """What to dial instead of the target."""
        return f"ws://{self.host}:{self.port}"

    def stall(self, *ways: Way) -> None:
        """Keep what comes and pass nothing on, as a peer that has stopped or a network that has gone."""
        for way in ways or ("there", "back"):
            self._open[way].clear()

    def heal(self) -> None:
        """Pass everything again, first what was kept."""
        for event in self._open.values():
            event.set()
        self.refusing = False

    def cut(self) -> None:
        """Reset every connection that is open now; new ones are served unless `refusing` is set."""
        for writer in self._writers:
            writer.transport.abort()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[LinkProxy]:
        """Listen while the context lasts; every connection is cut at its end."""
        server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.heal()
            self.cut()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        self.connections += 1
        try:
            target_reader, target_writer = await asyncio.open_connection(self.target_host, self.target_port)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, target_writer}
        self._writers |= pair
        try:
            async with asyncio.TaskGroup() as tasks:
                routes: list[tuple[Way, asyncio.StreamReader, asyncio.StreamWriter]] = [
                    ("there", reader, target_writer),
                    ("back", target_reader, writer),
                ]
                for way, source, sink in routes:
                    chunks: Chunks = asyncio.Queue(CHUNKS_IN_FLIGHT_MAX)
                    tasks.create_task(self._read(way, source, chunks))
                    tasks.create_task(self._write(way, chunks, sink))
        except* OSError:
            pass  # a side has reset the connection: the other gets the same below
        finally:
            self._writers -= pair
            for end in pair:
                end.transport.abort()

    async def _read(self, way: Way, reader: asyncio.StreamReader, chunks: Chunks) -> None:
        loop = asyncio.get_running_loop()
        data = b"start"
        free_at = loop.time()
        while data:
            data = await reader.read(READ_BYTES_MAX)
            free_at = max(free_at, loop.time()) + len(data) / self.bytes_per_s[way]
            await chunks.put((free_at + self.delay_s[way], data))

    async def _write(self, way: Way, chunks: Chunks, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s, data = await chunks.get()
            await asyncio.sleep(due_s - loop.time())
            await self._open[way].wait()
            if not data:
                writer.write_eof()
                return
            self.passed_bytes[way] += len(data)
            if self.heard is not None:
                self.heard[way] += data
            writer.write(data)
            await writer.drain()
