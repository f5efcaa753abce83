"""Runs one call's generation and writes its answers, whole or as a stream, in any endpoint's dialect.

An `AnswerResponse` is an ASGI application: Litestar calls it once the request has been checked, and everything
that a generation needs (its task, the watch for a client that leaves, the writing) starts and ends in there.

When a stream's headers are sent: with the first token, or after one keep-alive interval without any. Until
then a refusal or failure is a response of its own with its own status; after that it is an error frame.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

import structlog
from litestar.types import Receive, Scope, Send

from gateway.answer import Answer
from gateway.answer_encoder import AnswerEncoder, Usage
from gateway.answer_threads import Part, WantedAnswers, encode
from gateway.client_watch import client_gone
from gateway.generation_request import Token
from gateway.openai_errors import HTTP_INTERNAL_ERROR, ApiError, from_mesh_error, internal_error, not_ready
from gateway.request_record import ClientLeft, RequestRecord
from gateway.response_writer import ResponseWriter, StreamLimits
from gateway.token_feed import TokenFeed, TokenStream
from shared.clock import Clock
from shared.errors import MeshError

log = structlog.get_logger(__name__)


class AnswerResponse:
    """The answers to one call, on their way to one caller.

    Args:
        start: Makes the generation; called when the response begins.
        answers: Fresh, one for each choice; they turn tokens into text.
        encoder: Fresh; turns text into the endpoint's bytes.
        prompt_tokens: For the usage.
        stream: Whether to stream.
        limits: Silences that are allowed.
        record: Gets the figures of the log line.
        clock: Times the first token.
    """

    def __init__(
        self,
        start: Callable[[], AbstractAsyncContextManager[TokenStream]],
        answers: Sequence[Answer],
        encoder: AnswerEncoder,
        *,
        prompt_tokens: int,
        stream: bool,
        limits: StreamLimits,
        record: RequestRecord,
        clock: Clock,
    ) -> None:
        self._start = start
        self._answers = answers
        self._open = {choice for choice, answer in enumerate(answers) if not answer.has_finished}
        self._encoder = encoder
        self._prompt_tokens = prompt_tokens
        self._stream = stream
        self._limits = limits
        self._record = record
        self._clock = clock
        self._unshown = set(range(len(answers)))
        self._gone = threading.Event()
        self._feed: TokenFeed | None = None
        self._generation: asyncio.Task[None] | None = None

    def stop(self, error: ApiError) -> None:
        """End a running answer with this error, once what has been generated is written; no news to one that is not."""
        if self._feed is not None and self._generation is not None:
            self._feed.fail(error)
            self._generation.cancel()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send.

        Raises:
            ApiError: Nothing has been sent yet; whoever called answers with it.
            Exception: A fault of ours, likewise.
        """
        feed = self._feed = TokenFeed(self._start())
        writer = ResponseWriter(send, self._limits.stall_s, self._clock)
        failure: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
            generation = self._generation = tasks.create_task(feed.run())
            watch = tasks.create_task(self._leave_with_client(receive, feed, generation))
            try:
                await (self._write_stream(feed, writer) if self._stream else self._write_whole(feed, writer))
            except asyncio.CancelledError:  # the server's time for draining is over: say so, and end
                failure = not_ready("The server is shutting down.")
            except Exception as error:  # noqa: BLE001 - handled below, where no group wraps what is raised
                failure = error
            finally:
                self._gone.set()
                generation.cancel()
                watch.cancel()
                self._note_figures()
        if failure is not None:
            await self._fail(failure, writer)

    async def _write_whole(self, feed: TokenFeed, writer: ResponseWriter) -> None:
        while not self._is_complete(feed):
            for token in await self._take(feed):
                self._push(feed, token, parts=None)
        answers = WantedAnswers(self._answers, self._gone)
        whole = partial(self._encoder.whole, answers, feed.prompt_scores, self.usage())
        await writer.write_whole(await self._encode([whole], self.usage().completion_tokens))

    async def _write_stream(self, feed: TokenFeed, writer: ResponseWriter) -> None:
        has_begun = is_complete = False
        while not is_complete:
            tokens = await self._take(feed)
            parts: list[Part] = []
            if not has_begun and (tokens or feed.has_ended):
                has_begun = True
                parts.append(partial(self._encoder.begin, feed.prompt_scores))
                parts.extend(partial(self._encoder.finish, choice, answer) for choice, answer in self._ended_answers())
            for token in tokens:
                self._push(feed, token, parts)
            is_complete = self._is_complete(feed)
            if is_complete:
                parts.append(partial(self._encoder.end, self.usage()))
            data = await self._encode(parts, len(tokens))
            self._unshown.difference_update(token.choice for token in tokens)
            if not data and writer.quiet_s >= self._limits.keep_alive_s:
                data = self._encoder.keep_alive  # nothing came, or nothing that shows
            await writer.write(data, last=is_complete)

    async def _encode(self, parts: Sequence[Part], tokens: int) -> bytes:
        """Make parts of the answer that show so many generated tokens, and perhaps prompts.

        Raises:
            ClientLeft: Nobody waits for them.
        """
        if not self._encoder.works_in_threads:
            return b"".join([part() for part in parts])
        shown = self._encoder.prompt_tokens_shown if self._unshown else 0
        return await encode(parts, tokens=tokens + shown, gone=self._gone)

    async def _take(self, feed: TokenFeed) -> list[Token]:
        """The tokens that have come; none after a silence, or when none will.

        Raises:
            MeshError: `ended_early`: the generation has ended and an answer has not.
        """
        tokens = await feed.take(self._limits.keep_alive_s)
        if not tokens and feed.has_ended and not self._is_complete(feed):
            raise MeshError("ended_early", "the generation ended before its answer did")
        return tokens

    def _is_complete(self, feed: TokenFeed) -> bool:
        """Whether every answer has its end; where nothing was to be generated, whether the prompt has been scored."""
        if self._open:
            return False
        return feed.has_ended or any(answer.completion_tokens for answer in self._answers)

    def _push(self, feed: TokenFeed, token: Token, parts: list[Part] | None) -> None:
        """Let a token enter its answer, and its answer's part of the stream if this is one."""
        answer = self._answers[token.choice]
        if token.choice not in self._open:
            return  # tokens that were on their way when the answer ended
        if "ttft_ms" not in self._record.fields:
            self._note_first_token()
        piece = answer.push(token)
        if parts is not None:
            parts.append(partial(self._encoder.piece, token.choice, piece))
        if not answer.has_finished:
            return
        self._open.discard(token.choice)
        feed.finish(token.choice)
        if parts is not None:
            parts.append(partial(self._encoder.finish, token.choice, answer))

    def _ended_answers(self) -> list[tuple[int, Answer]]:
        """Those that ended before a token came: none was to be generated."""
        return [(choice, answer) for choice, answer in enumerate(self._answers) if answer.has_finished]

    def usage(self) -> Usage:
        """What the call has used so far."""
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(answer.completion_tokens for answer in self._answers),
            reasoning_tokens=sum(answer.reasoning_tokens for answer in self._answers),
        )

    async def _fail(self, error: Exception, writer: ResponseWriter) -> None:
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
            if self.usage().completion_tokens:  # the caller's SDK would only do the same work again
                api_error.headers["x-should-retry"] = "false"
        if not writer.started:
            raise (error if api_error.status == HTTP_INTERNAL_ERROR else api_error) from error
        if api_error.status == HTTP_INTERNAL_ERROR:
            log.error("request.crashed", request_id=self._record.request_id, exc_info=error)
        self._record.fields["error"] = api_error.code
        await writer.write(self._encoder.error(api_error), last=True)

    def _note_first_token(self) -> None:
        self._record.fields["ttft_ms"] = round((self._clock.monotonic() - self._record.started_s) * 1000, 1)

    def _note_figures(self) -> None:
        usage = self.usage()
        self._record.fields.update(
            stream=self._stream,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=self._answers[0].finish_reason,
        )
        if len(self._answers) > 1:
            self._record.fields["choices"] = len(self._answers)

    async def _leave_with_client(self, receive: Receive, feed: TokenFeed, generation: asyncio.Task[None]) -> None:
        """End generation and encoding as soon as the client is gone, even while nothing is being sent to it."""
        await client_gone(receive)
        self._gone.set()
        feed.fail(ClientLeft())
        generation.cancel()
