"""A generation in a task of its own, and its tokens handed over in batches.

A generation's context manager must be left in the task that entered it, whatever becomes of the HTTP
response; so it never leaves `TokenFeed.run`. The reader takes what is there. When the reader is slow
the feed fills up and the generation waits: nothing grows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from gateway.generation_request import PromptScores, Token

FEED_TOKENS_MAX = 64
"""How far a generation may run ahead of its reader."""


class TokenStream(Protocol):
    """The tokens of a generation's choices, as they come."""

    @property
    def prompt_scores(self) -> PromptScores:
        """The scored prompt; complete before the first token comes, and at the latest at the end."""
        ...

    def finish(self, choice: int) -> None:
        """No more of this choice is wanted: nothing further is computed for it. Idempotent."""
        ...

    def __aiter__(self) -> AsyncIterator[Token]:
        """Iterating yields tokens until every choice has ended or is finished."""
        ...


class TokenFeed:
    """Tokens of one generation. `run` must run as a task while `take` is called by another.

    Args:
        generation: Entered and left by `run`.
        tokens_max: How many tokens may wait to be taken.
    """

    def __init__(
        self,
        generation: AbstractAsyncContextManager[TokenStream],
        *,
        tokens_max: int = FEED_TOKENS_MAX,
    ) -> None:
        self._generation = generation
        self._stream: TokenStream | None = None
        self._tokens_max = tokens_max
        self._tokens: list[Token] = []
        self._failure: Exception | None = None
        self._ended = False
        self._reader: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Enter the generation, read it to its end, and leave it. Failures go to the reader."""
        try:
            async with self._generation as self._stream:
                async for token in self._stream:
                    self._tokens.append(token)
                    _wake(self._reader)
                    if len(self._tokens) >= self._tokens_max:
                        self._room = asyncio.get_running_loop().create_future()
                        await self._room
        except Exception as error:  # noqa: BLE001 - the outermost frame of this task; `take` raises it
            self.fail(error)
        finally:
            self._ended = True
            _wake(self._reader)

    async def take(self, quiet_s: float) -> list[Token]:
        """Return the tokens that have come, waiting for the first at most `quiet_s`; empty when none came.

        Raises:
            MeshError: What the generation failed with, after the tokens that came before.
            Exception: What `fail` was called with.
        """
        if not self._tokens and not self._ended and self._failure is None:
            await self._wait(quiet_s)
        if self._tokens:
            tokens, self._tokens = self._tokens, []
            _wake(self._room)
            return tokens
        if self._failure is not None:
            raise self._failure
        return []

    @property
    def has_ended(self) -> bool:
        """Whether the generation has been left: no token will come beside those that wait."""
        return self._ended

    @property
    def prompt_scores(self) -> PromptScores:
        """The scored prompt, once the first token has come or the generation has ended; empty where not asked for."""
        return self._stream.prompt_scores if self._stream else PromptScores()

    def finish(self, choice: int) -> None:
        """The reader needs no more tokens of a choice."""
        if self._stream is not None:
            self._stream.finish(choice)

    def fail(self, error: Exception) -> None:
        """Let the reader get this error once it has taken what is there."""
        if self._failure is None:
            self._failure = error
        _wake(self._reader)

    async def _wait(self, quiet_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._reader = loop.create_future()
        timer = loop.call_later(quiet_s, _wake, self._reader)
        try:
            await self._reader
        finally:
            timer.cancel()
            self._reader = None


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
