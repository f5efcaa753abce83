"""Runs one chat completion and writes its answer, whole or as a stream.

A `ChatResponse` is an ASGI application: Litestar calls it once the request has been checked, and everything
that a generation needs (its task, the watch for a client that leaves, the writing) starts and ends in there.

When a stream's headers are sent: with the first token, or after one keep-alive interval without any. Until
then a refusal or failure is a response of its own with its own status; after that it is an error frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import structlog
from litestar.types import Receive, Scope, Send

from gateway.answer import Answer, FinishReason
from gateway.edge import send_whole
from gateway.generation_request import Token
from gateway.openai_errors import HTTP_INTERNAL_ERROR, ApiError, from_mesh_error, internal_error, not_ready
from gateway.openai_stream import (
    DONE,
    KEEP_ALIVE,
    STREAM_HEADERS,
    ChunkEncoder,
    CompletionIdentity,
    Usage,
    completion_body,
    error_frame,
)
from gateway.request_record import ClientLeft, RequestRecord
from gateway.token_feed import TokenFeed
from shared.clock import Clock
from shared.errors import MeshError

log = structlog.get_logger(__name__)


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


class ChatResponse:
    """One answer on its way to one caller.

    Args:
        start: Makes the generation; called when the response begins.
        answer: Fresh; turns tokens into text.
        identity: What the answer calls itself.
        prompt_tokens: For the usage.
        stream: Whether to stream.
        include_usage: Whether a stream ends with its usage.
        limits: Silences that are allowed.
        record: Gets the figures of the log line.
        clock: Times the first token.
    """

    def __init__(
        self,
        start: Callable[[], AbstractAsyncContextManager[AsyncIterator[Token]]],
        answer: Answer,
        identity: CompletionIdentity,
        *,
        prompt_tokens: int,
        stream: bool,
        include_usage: bool,
        limits: StreamLimits,
        record: RequestRecord,
        clock: Clock,
    ) -> None:
        self._start = start
        self._answer = answer
        self._identity = identity
        self._prompt_tokens = prompt_tokens
        self._stream = stream
        self._include_usage = include_usage
        self._limits = limits
        self._record = record
        self._clock = clock

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send.

        Raises:
            ApiError: Nothing has been sent yet; whoever called answers with it.
            Exception: A fault of ours, likewise.
        """
        feed = TokenFeed(self._start())
        writer = _Writer(send, self._limits.stall_s, self._clock)
        failure: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
            generation = tasks.create_task(feed.run())
            watch = tasks.create_task(_leave_with_client(receive, feed, generation))
            try:
                await (self._write_stream(feed, writer) if self._stream else self._write_whole(feed, writer))
            except asyncio.CancelledError:  # the server's time for draining is over: say so, and end
                failure = not_ready("The server is shutting down.")
            except Exception as error:  # noqa: BLE001 - handled below, where no group wraps what is raised
                failure = error
            finally:
                generation.cancel()
                watch.cancel()
                self._note_figures()
        if failure is not None:
            await self._fail(failure, writer)

    async def _write_whole(self, feed: TokenFeed, writer: _Writer) -> None:
        text: list[str] = []
        reason = None
        while reason is None:
            texts, reason = self._read(await feed.take(self._limits.keep_alive_s))
            text += texts
        await writer.write_whole(completion_body(self._identity, "".join(text), reason, self._usage()))

    async def _write_stream(self, feed: TokenFeed, writer: _Writer) -> None:
        encoder = ChunkEncoder(self._identity, include_usage=self._include_usage)
        role = encoder.role()
        reason = None
        while reason is None:
            tokens = await feed.take(self._limits.keep_alive_s)
            if not tokens:
                await writer.write(KEEP_ALIVE)
                continue
            texts, reason = self._read(tokens)
            frames = [role, *map(encoder.content, texts)]
            role = b""
            if reason is not None:
                frames += self._last_frames(encoder, reason)
            data = b"".join(frames)
            if not data and writer.quiet_s >= self._limits.keep_alive_s:
                data = KEEP_ALIVE  # tokens come, but none that shows
            await writer.write(data, last=reason is not None)

    def _read(self, tokens: list[Token]) -> tuple[list[str], FinishReason | None]:
        """The texts that these tokens add, up to the answer's end, and why it ended if it did."""
        if tokens and not self._answer.completion_tokens:
            self._note_first_token()
        texts = []
        for token in tokens:
            texts.append(self._answer.push(token.id))
            if self._answer.finish_reason is not None:
                break
        return [text for text in texts if text], self._answer.finish_reason

    def _last_frames(self, encoder: ChunkEncoder, reason: FinishReason) -> list[bytes]:
        usage = [encoder.usage(self._usage())] if self._include_usage else []
        return [encoder.finish(reason), *usage, DONE]

    def _usage(self) -> Usage:
        return Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self._answer.completion_tokens)

    async def _fail(self, error: Exception, writer: _Writer) -> None:
        """End with an error frame if a stream has begun; else raise, for an error response.

        Raises:
            ApiError: What to answer.
            Exception: The fault of ours that was given.
        """
        if isinstance(error, ClientLeft):
            self._record.fields["client_left"] = error.how
            return
        api_error = error if isinstance(error, ApiError) else internal_error()
        if isinstance(error, MeshError):
            api_error = from_mesh_error(error)
            if self._answer.completion_tokens:  # the caller's SDK would only do the same work again
                api_error.headers["x-should-retry"] = "false"
        if not writer.started:
            raise (error if api_error.status == HTTP_INTERNAL_ERROR else api_error) from error
        if api_error.status == HTTP_INTERNAL_ERROR:
            log.error("request.crashed", request_id=self._record.request_id, exc_info=error)
        self._record.fields["error"] = api_error.code
        await writer.write(error_frame(api_error), last=True)

    def _note_first_token(self) -> None:
        self._record.fields["ttft_ms"] = round((self._clock.monotonic() - self._record.started_s) * 1000, 1)

    def _note_figures(self) -> None:
        self._record.fields.update(
            stream=self._stream,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._answer.completion_tokens,
            finish_reason=self._answer.finish_reason,
        )


class _Writer:
    """Sends a response's parts, and does not wait for ever for a client that does not read them."""

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


async def _leave_with_client(receive: Receive, feed: TokenFeed, generation: asyncio.Task[None]) -> None:
    """End the generation as soon as the client is gone, even while nothing is being sent to it."""
    while (await receive())["type"] != "http.disconnect":
        pass
    feed.fail(ClientLeft())
    generation.cancel()
