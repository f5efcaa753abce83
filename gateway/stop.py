"""Stop strings, found in text that arrives in pieces.

Theory of operation: an Aho-Corasick automaton over the stop strings reads the text one character at a
time. Its state is the longest end of the text that begins some stop string, so the state's depth is
exactly how many characters must be held back: fewer could leak the beginning of a stop string, more
would delay text for nothing. The first character that completes a stop string ends the text just before
that string; when several end there, before the longest. What comes out therefore does not depend on
how the text was cut into pieces, and the cost per character is constant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string appears in it.

    Args:
        stops: Stop strings, none of them empty.
        shown: Whether the one that ends the text is part of it.

    Raises:
        ValueError: If a stop string is empty: it would end every answer before it began.
    """

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self.matched: str | None = None
        self._is_shown = shown
        self._held = ""
        self._state = 0
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fail = self._failure_links()

    def push(self, text: str) -> str:
        """Take the next text and return what may be shown of it and of what was held back.

        Once `matched` is set the text has ended, and nothing more comes out.
        """
        if self.matched is not None:
            return ""
        if not self._state and self._first_chars.isdisjoint(text):
            return text
        for index, char in enumerate(text):
            self._advance(char)
            self.matched = self._match[self._state]
            if self.matched is not None:
                ended, self._held = self._held + text[: index + 1], ""
                return ended if self._is_shown else ended[: -len(self.matched)]
        buffer = self._held + text
        shown_chars = len(buffer) - self._depth[self._state]
        self._held = buffer[shown_chars:]
        return buffer[:shown_chars]

    def flush(self) -> str:
        """The text has ended: return what was held back in case more would come."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _advance(self, char: str) -> None:
        state = self._state
        while state and char not in self._next[state]:
            state = self._fail[state]
        self._state = self._next[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = self._next[state][char]
        self._match[state] = stop

    def _failure_links(self) -> list[int]:
        """For each state, the longest proper end of it that is a state too; breadth first."""
        fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if self._match[state] is None:
                self._match[state] = self._match[fail[state]]
            for char, child in self._next[state].items():
                link = fail[state]
                while link and char not in self._next[link]:
                    link = fail[link]
                fail[child] = self._next[link].get(char, 0)
                queue.append(child)
        return fail
