"""The stream of a request with one choice."""

from __future__ import annotations

import asyncio

from gateway.choice import Choice
from gateway.figures import Figures
from gateway.generation_request import PromptScores, Token


class OneChoice:
    """A `ChoiceStream` of one choice, computed by whoever reads it.

    Args:
        choice: The choice.
        scores: Of its prompt.
    """

    def __init__(self, choice: Choice, scores: PromptScores) -> None:
        self.prompt_scores = scores
        self._choice = choice
        self._reader: asyncio.Task[object] | None = None
        self._is_finished = False

    @property
    def figures(self) -> Figures:
        """What was done so far."""
        return self._choice.generation.figures

    @property
    def is_complete(self) -> bool:
        """Whether the last token has been given out."""
        return self._choice.is_complete

    def finish(self, choice: int) -> None:
        """End it; a token that another task awaits is not computed any further.

        Raises:
            ValueError: There is no such choice.
        """
        if choice:
            raise ValueError(f"there is no choice {choice}, only 0")
        if self._is_finished:
            return
        self._is_finished = True
        self._choice.finish()
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()

    def __aiter__(self) -> OneChoice:
        return self

    async def __anext__(self) -> Token:
        """The next token.

        Raises:
            GenerationFailed: The generation cannot go on.
            StopAsyncIteration: The answer is complete, or the stream has ended before.
        """
        self._reader = asyncio.current_task()
        try:
            token = await self._choice.next()
        except asyncio.CancelledError:
            if not self._is_finished or self._reader is None or self._reader.uncancel():
                raise
            token = None
        finally:
            self._reader = None
        if token is None:
            raise StopAsyncIteration
        return token
