"""Sends bytes of a file, read in threads, without keeping the event loop or holding more than a chunk in memory."""

from __future__ import annotations

import asyncio
import os
from typing import Final

from litestar.types import Receive, Scope, Send

from gateway.byte_range import RangeNotSatisfiable, parse_range
from gateway.client_watch import client_gone
from gateway.edge import send_whole
from gateway.model_files import ModelFiles, ServedFile
from gateway.request_record import ClientLeft
from shared.models.part_folder import PIECE_BYTES
from shared.models.partial_file import hash_span
from shared.models.range_client import content_digest_of
from shared.models.spans import Span

SEND_BYTES: Final = 256 * 1024
"""Read and handed to the transport at a time."""
DIGEST_BYTES_MAX: Final = PIECE_BYTES
"""Answers of at most so much carry the hash of their content (RFC 9530), for which they are read twice."""


class FileResponse:
    """The answer to one request for a file, an ASGI application.

    Args:
        files: Whose file it is.
        file: Which.
        range_header: What of it was asked for.
        is_head: Only the headers were asked for.
        stall_s: A client that takes nothing for this long has left.
    """

    def __init__(
        self, files: ModelFiles, file: ServedFile, range_header: str | None, *, is_head: bool, stall_s: float
    ) -> None:
        self._files = files
        self._file = file
        self._range_header = range_header
        self._is_head = is_head
        self._stall_s = stall_s

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send.

        Raises:
            ApiError: 503: too many others are reading.
            ClientLeft: The client was gone before the end.
        """
        size = self._file.size_bytes
        headers = [(b"accept-ranges", b"bytes"), (b"etag", self._files.etag.encode())]
        try:
            part = parse_range(self._range_header, size)
        except RangeNotSatisfiable:
            await send_whole(send, 416, b"", [*headers, (b"content-range", b"bytes */%d" % size)])
            return
        span = part or Span(0, size)
        if part is not None:
            headers.append((b"content-range", b"bytes %d-%d/%d" % (span.start, span.end - 1, size)))
        headers += [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % span.nbytes)]
        async with self._files.place():
            if span.nbytes <= DIGEST_BYTES_MAX and not self._is_head:
                headers.append((b"content-digest", await self._digest(span)))
            status = 200 if part is None else 206
            await send({"type": "http.response.start", "status": status, "headers": headers})
            left = await self._send_body(Span(0, 0) if self._is_head else span, receive, send)
        if left is not None:
            raise left

    async def _digest(self, span: Span) -> bytes:
        digest = await asyncio.get_running_loop().run_in_executor(self._files.readers, hash_span, self._file.path, span)
        return content_digest_of(bytes.fromhex(digest)).encode()

    async def _send_body(self, span: Span, receive: Receive, send: Send) -> ClientLeft | None:
        """Send the bytes; how the client left, if it did."""
        left: ClientLeft | None = None
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(client_gone(receive))
            descriptor = os.open(self._file.path, os.O_RDONLY)
            try:
                for start in range(span.start, span.end, SEND_BYTES):
                    if watch.done():
                        left = ClientLeft()
                        break
                    await self._send_chunk(descriptor, Span(start, min(start + SEND_BYTES, span.end)), send)
                else:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            except TimeoutError:
                left = ClientLeft("stalled")
            finally:
                os.close(descriptor)
                watch.cancel()
        return left

    async def _send_chunk(self, descriptor: int, span: Span, send: Send) -> None:
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(self._files.readers, os.pread, descriptor, span.nbytes, span.start)
        if len(data) != span.nbytes:
            raise OSError(f"{self._file.path} became shorter while it was served")
        async with asyncio.timeout(self._stall_s):
            await send({"type": "http.response.body", "body": data, "more_body": True})
