"""What `meshnet demo` shows: text that streams within margins, and notes on lines of their own."""

from __future__ import annotations

from typing import Final

from rich.console import Console

MARGIN: Final = "  "
WIDTH_MAX: Final = 92
"""Longer lines are hard to read, and do not fit a page."""


class Narrator:
    """Writes to a console; remembers the column, so that a note never begins in the middle of a line.

    Args:
        console: Where; colours only where it is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._width = min(console.width, WIDTH_MAX)
        self._column = 0

    def title(self, text: str) -> None:
        """A heading."""
        self._end_line()
        self._console.print(f"\n{text}\n", style="bold", markup=False, highlight=False)

    def note(self, text: str, style: str = "") -> None:
        """A line of its own."""
        self._end_line()
        self._console.print(f"{MARGIN}{text}", style=style, markup=False, highlight=False, soft_wrap=True)

    def stream(self, text: str, style: str = "") -> None:
        """The next piece of a text, broken between pieces where the line is full."""
        for index, line in enumerate(text.split("\n")):
            if index:
                self._end_line()
            if line:
                self._write(line, style)

    def _write(self, piece: str, style: str) -> None:
        if self._column and self._column + len(piece) > self._width:
            self._end_line()
        if not self._column:
            piece = MARGIN + piece.removeprefix(" ")
        self._column += len(piece)
        self._console.print(piece, style=style, end="", markup=False, highlight=False, soft_wrap=True)

    def _end_line(self) -> None:
        if self._column:
            self._console.print()
        self._column = 0
