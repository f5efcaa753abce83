"""Text that arrives in pieces, for a grammar written as if it were all there.

A grammar is a generator that reads from a `Source` with ``yield from`` and is suspended whenever the text
does not yet decide what comes next. It never sees where one piece ends and the next begins, so what it
finds cannot depend on that. Waiting is as short as possible: a read returns as soon as no later text
could change its result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Parse: TypeAlias = Generator[None, None, T]
Give: TypeAlias = Callable[[str], None]

SPACE_CHARS_MAX = 64  # white space around a marker is part of it up to here; more is text, so little is held back


class Malformed(Exception):
    """The text cannot be what the grammar expected here."""


class CutOff(Exception):
    """The text ended where the grammar expected more."""


class Markers:
    """A set of literals to look for.

    Args:
        literals: What to find. None may begin another, or lie inside one other than at its end, for then
            the first to be complete would not be the first to begin.
        trim: Whether white space before a literal belongs to it, up to `SPACE_CHARS_MAX`.

    Raises:
        ValueError: Such literals, or an empty one.
    """

    def __init__(self, *literals: str, trim: bool = False) -> None:
        for one in literals:
            if not one or any(one in other and not other.endswith(one) for other in literals if other != one):
                raise ValueError(f"marker {one!r} is empty or part of another one")
        ordered = sorted(literals, key=len, reverse=True)
        prefixes = sorted({one[:end] for one in literals for end in range(1, len(one))}, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, ordered)))
        self._begun = re.compile(rf"(?:{'|'.join(map(re.escape, prefixes)) or '(?!)'})\Z")
        self._window = max(map(len, literals)) - 1
        self._trim = trim

    def find(self, text: str, start: int) -> tuple[int, int, str] | None:
        """Return the first marker at or after `start`: where its white space begins, where it does, and the literal."""
        match = self._whole.search(text, start)
        return (self._space_start(text, start, match.start()), match.start(), match[0]) if match else None

    def undecided(self, text: str, start: int) -> int:
        """Return where the end of `text`, at or after `start`, may be the beginning of a marker."""
        match = self._begun.search(text, max(start, len(text) - self._window))
        return self._space_start(text, start, match.start() if match else len(text))

    def _space_start(self, text: str, start: int, end: int) -> int:
        if not self._trim:
            return end
        before = text[max(start, end - SPACE_CHARS_MAX) : end]
        return end - len(before) + len(before.rstrip())


def discard(text: str) -> None:
    """Give text to nobody."""
    del text


class Source:
    """The text of one answer as far as it has come, and how much of it has been read."""

    def __init__(self) -> None:
        self._text = ""
        self._pos = 0
        self._ended = False
        self._record: list[str] | None = None
        self.space_before = ""
        """The white space that was part of the last marker `until` read."""

    @property
    def held_chars(self) -> int:
        """How much text is kept: not yet read, or kept to be given back."""
        return len(self._text) - self._pos + sum(map(len, self._record or ()))

    def feed(self, text: str) -> None:
        """Append text; the caller resumes the grammar next."""
        self._text = self._text[self._pos :] + text
        self._pos = 0

    def end(self) -> None:
        """Say that no more text will come; the caller resumes the grammar next."""
        self._ended = True

    def record(self, opening: str = "") -> None:
        """Keep what is read from here on, for `recorded`, behind `opening`."""
        self._record = [opening]

    def forget(self) -> None:
        """Keep nothing any more."""
        self._record = None

    def recorded(self) -> str:
        """Return what was read since `record`, and keep nothing any more."""
        text = "".join(self._record or ())
        self._record = None
        return text

    def take(self, chars: int) -> str:
        """Read at most `chars` of the text that is there."""
        text = self._text[self._pos : self._pos + chars]
        self._pos += len(text)
        if self._record is not None:
            self._record.append(text)
        return text

    def rest(self) -> str:
        """Read all of the text that is there."""
        return self.take(len(self._text) - self._pos)

    def match(self, pattern: re.Pattern[str]) -> str:
        """Read what matches at this place of the text that is there; it may go on in the next piece."""
        match = pattern.match(self._text, self._pos)
        return self.take(match.end() - self._pos) if match else ""

    def peek(self, chars: int = 1) -> Parse[str]:
        """Return the next `chars` without reading them; fewer only at the end of the text."""
        while len(self._text) - self._pos < chars and not self._ended:
            yield
        return self._text[self._pos : self._pos + chars]

    def next_char(self) -> Parse[str]:
        """Return the next character without reading it.

        Raises:
            CutOff: There is none.
        """
        char = yield from self.peek()
        if not char:
            raise CutOff
        return char

    def is_next(self, *literals: str, offset: int = 0) -> Parse[str]:
        """Return which of `literals` comes `offset` characters on, the longest, or an empty text; read nothing."""
        for literal in sorted(literals, key=len, reverse=True):
            while True:
                there = self._text[self._pos + offset : self._pos + offset + len(literal)]
                if there == literal:
                    return literal
                if self._ended or not literal.startswith(there):
                    break
                yield
        return ""

    def accept(self, *literals: str) -> Parse[str]:
        """Read one of `literals`, the longest that comes next; an empty text if none does."""
        literal = yield from self.is_next(*literals)
        return self.take(len(literal))

    def expect(self, *literals: str) -> Parse[str]:
        """Read one of `literals`.

        Raises:
            Malformed: Something else comes next.
            CutOff: The text ends within one.
        """
        literal = yield from self.accept(*literals)
        if not literal:
            rest = self._text[self._pos :]
            raise CutOff if self._ended and any(one.startswith(rest) for one in literals) else Malformed
        return literal

    def skip_space(self) -> Parse[None]:
        """Read white space, up to `SPACE_CHARS_MAX`."""
        length = yield from self._space_length()
        self.take(length)

    def follows(self, *literals: str, end: bool = False) -> Parse[bool]:
        """Say whether one of `literals` comes after white space; read nothing.

        With `end`, so does the end of the text, and one of them that the end cuts.
        """
        length = yield from self._space_length()
        if (yield from self.is_next(*literals, offset=length)):
            return True
        rest = self._text[self._pos + length :]
        return end and self._ended and any(literal.startswith(rest) for literal in literals)

    def word(self, char: re.Pattern[str], chars_max: int) -> Parse[str]:
        """Read the characters that match `char`, one by one; stop at the first other one, or the end of the text.

        Raises:
            Malformed: There are more than `chars_max`.
        """
        text = ""
        while (yield from self.peek()) and (one := self.match(char)):
            text += one
            if len(text) > chars_max:
                raise Malformed
        return text

    def until(self, markers: Markers, give: Give) -> Parse[str]:
        """Give the text up to the first marker and read that; return its literal, or an empty text at the end."""
        while True:
            found = markers.find(self._text, self._pos)
            if found:
                space, start, literal = found
                give(self.take(space - self._pos))
                self.space_before = self.take(start - space)
                return self.take(len(literal))
            if self._ended:
                give(self.rest())
                return ""
            give(self.take(markers.undecided(self._text, self._pos) - self._pos))
            yield

    def up_to(self, markers: Markers, give: Give) -> Parse[str]:
        """As `until`, for a text that a marker must end.

        Raises:
            CutOff: None does. What may be the beginning of one was not given.
        """
        while markers.find(self._text, self._pos) is None:
            give(self.take(markers.undecided(self._text, self._pos) - self._pos))
            if self._ended:
                raise CutOff
            yield
        return (yield from self.until(markers, give))

    def head(self, markers: Markers, chars_max: int) -> Parse[tuple[str, str]]:
        """Read short text up to a marker; return the text and the marker's literal.

        Raises:
            Malformed: No marker within `chars_max`; nothing was read then.
            CutOff: The text ended.
        """
        while True:
            found = markers.find(self._text, self._pos)
            start = found[0] if found else markers.undecided(self._text, self._pos)
            if start - self._pos > chars_max:
                raise Malformed
            if found:
                text = self.take(start - self._pos)
                self.take(found[1] - start)
                return text, self.take(len(found[2]))
            if self._ended:
                raise CutOff
            yield

    def _space_length(self) -> Parse[int]:
        length = 0
        while length < SPACE_CHARS_MAX:
            if self._pos + length == len(self._text):
                if self._ended:
                    break
                yield
            elif self._text[self._pos + length].isspace():
                length += 1
            else:
                break
        return length
