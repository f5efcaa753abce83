"""Tokens as a caller reads them, and one choice of them as it is made."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol, Self, TypeVar

from gateway.errors import GenerationFailed
from gateway.figures import Figures
from gateway.generation_request import GenerationRequest, PromptScores, Token
from gateway.lifecycle import Outcome
from gateway.passes import EncodeText, draw, prime
from gateway.prompt_scores import PromptScorer
from gateway.relay import Generation

T = TypeVar("T")


class ChoiceStream(Protocol):
    """The tokens of all choices of a request. Given by `Generator.generation`; one task at a time may iterate."""

    @property
    def figures(self) -> Figures:
        """What was done so far."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended, by an end of sequence, by its last token, or because `finish` said so."""
        ...

    @property
    def prompt_scores(self) -> PromptScores:
        """The scored prompt, complete before the first token is given out; empty where it was not asked for."""
        ...

    def finish(self, choice: int) -> None:
        """Nothing more of this choice is needed: it is not computed, not given out, and frees its places."""
        ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Token:
        """The next token. Choices come as they are made, but each for the first time after those before it.

        Raises:
            GenerationFailed: The request cannot go on.
            StopAsyncIteration: Every choice has ended, or the stream has failed before.
        """
        ...


class Choice:
    """One choice: its tokens, one after the other, computed as they are asked for.

    A failure or a cancellation while a token is awaited ends it.

    Args:
        index: Which choice.
        generation: Whose tokens.
        request: How many, and which end it.
        encode_text: For a last hop that answers with text.
        scorer: Scores the prompt before the first token; None when another choice does, or nobody.
    """

    def __init__(
        self,
        index: int,
        generation: Generation,
        request: GenerationRequest,
        encode_text: EncodeText,
        *,
        scorer: PromptScorer | None = None,
    ) -> None:
        self.index = index
        self.generation = generation
        self.has_failed = False
        self._eos_ids = request.eos_ids
        self._left = request.max_tokens
        self._encode_text = encode_text
        self._scorer = scorer
        self._ready: deque[Token] = deque()
        self._is_broken = False

    @property
    def is_complete(self) -> bool:
        """Whether the last token has been given out, and the prompt scored where that was asked for."""
        return self._left == 0 and (self._scorer is None or self._scorer.is_complete)

    @property
    def outcome(self) -> Outcome:
        """How it ends if it ends now."""
        return "completed" if self.is_complete else "failed" if self.has_failed else "cancelled"

    def finish(self) -> None:
        """No more tokens."""
        self._left = 0
        self._scorer = None

    async def next(self) -> Token | None:
        """The next token; None when there is none.

        Raises:
            GenerationFailed: It cannot go on.
        """
        if self._is_broken or self.is_complete:
            return None
        if not self._ready:
            await self._extend()
        if not self._left:
            return None
        token = self._ready.popleft()
        self._left = 0 if token.id in self._eos_ids else self._left - 1
        return token if not self.index else replace(token, choice=self.index)

    async def prime(self) -> None:
        """Compute all of the prompt but its last position, which scores it.

        Raises:
            GenerationFailed: It cannot go on.
        """
        await self._attempt(prime(self.generation))

    async def _extend(self) -> None:
        if self._scorer is not None and not self._scorer.is_complete:
            await self.prime()
        if self._left:
            self._ready.extend(await self._attempt(draw(self.generation, self._encode_text)))

    async def _attempt(self, work: Awaitable[T]) -> T:
        self._is_broken = True  # until there is an answer: a pass that was left half-way cannot be taken up
        try:
            result = await work
        except GenerationFailed:
            self.has_failed = True
            raise
        self._is_broken = False
        return result
