"""Tokens of several choices on their way to one reader."""

from __future__ import annotations

import asyncio
from collections import deque

from gateway.generation_request import Token

LANE_TOKENS_MAX = 16
"""How far a choice may run ahead of the reader: enough that a slow reader delays none, few enough to waste little
when the reader needs no more. Behind a choice that has made nothing yet only the answer's length bounds it."""


class ChoiceLanes:
    """One lane per choice: makers `put`, one reader takes from them in turn.

    The first token of each choice is given out after the first tokens of all choices before it.

    Args:
        count: How many choices.
    """

    def __init__(self, count: int) -> None:
        self._lanes: list[deque[Token]] = [deque() for _ in range(count)]
        self._closed: set[int] = set()
        self._begun = 0  # choices below have given out a token, or never will
        self._cursor = 0
        self._changed = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether everything has been given out."""
        return not any(self._lanes)

    def has_room(self, choice: int) -> bool:
        """Whether a token of this choice need not wait.

        None waits for a choice before it that has made nothing yet: that one may wait for this one's place on a node.
        """
        is_held_back = choice > self._begun and not self._lanes[self._begun]
        return is_held_back or len(self._lanes[choice]) < LANE_TOKENS_MAX

    async def put(self, token: Token) -> None:
        """Hand a token over; waits while the reader is far behind."""
        while not self.has_room(token.choice):
            await self.change()
        self._lanes[token.choice].append(token)
        self.wake()

    def take(self) -> Token | None:
        """The next token that may be given out; None when there is none now."""
        count = len(self._lanes)
        self._skip_closed()
        for index in ((self._cursor + step) % count for step in range(count)):
            if index <= self._begun and self._lanes[index]:
                token = self._lanes[index].popleft()
                self._cursor = index + 1
                self._begun = max(self._begun, index + 1)
                self.wake()
                return token
        return None

    def close(self, choice: int) -> None:
        """Give out nothing more of this choice."""
        self._closed.add(choice)
        self._lanes[choice].clear()
        self._skip_closed()
        self.wake()

    async def change(self) -> None:
        """Wait until something has been put, taken, closed or woken."""
        await self._changed.wait()

    def wake(self) -> None:
        """Let those who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _skip_closed(self) -> None:
        while self._begun in self._closed:
            self._begun += 1
