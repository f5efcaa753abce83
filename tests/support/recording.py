"""Runs a command in a terminal and draws what it printed, as it printed it, as an SVG that moves by itself.

``python -m tests.support.recording docs/demo.svg -- meshnet demo`` is `make recording`. The command may only append:
text, line ends and colours, no cursor movement. Where an SVG's animation is not played, the last picture is seen.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

COLUMNS = 92
ROWS = 60
MERGED_S = 0.04
"""Pieces closer than this appear together."""
PAUSE_MAX_S = 4.0
"""Longer pauses are shortened to this in the picture; what the text says of them is not."""
HOLD_S = 6.0
"""How long the last picture stays before it begins again."""
CELL_WIDTH = 8.4
LINE_HEIGHT = 20.0
PADDING = 16.0
FONT_SIZE = 14.0

_ESCAPE = re.compile(r"\x1b\[([\d;]*)m")
_CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-ln-z]")
_CLASSES = {1: "b", 2: "d", 31: "r", 32: "g", 33: "y"}
_STYLE = """\
text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:14px;fill:#d5d8df}
.b{font-weight:700;fill:#fff}.d{fill:#8b93a5}.r{fill:#ff7b72}.g{fill:#7ee787}.y{fill:#e3b341}"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some characters that appeared together.

    Args:
        at_s: When, from the start.
        row: Their line, from 0.
        column: Their first column, from 0.
        text: What they are; no line ends.
        classes: Of their style, apart by spaces.
    """

    at_s: float
    row: int
    column: int
    text: str
    classes: str


def record(command: Sequence[str]) -> list[tuple[float, str]]:
    """Run a command with its standard output in a terminal, and time what it prints.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, env=env)
    os.close(theirs)
    events: list[tuple[float, str]] = []
    pending = b""
    while data := _read(ours):
        pending += data
        text, pending = _whole_characters(pending)
        events.append((time.monotonic(), text))
    os.close(ours)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    return [(at_s - events[0][0], text) for at_s, text in events]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux says so at the end
        return b""


def _whole_characters(data: bytes) -> tuple[str, bytes]:
    """What can be decoded, and the beginning of a character that has not come whole."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), data[error.start :]


def lay_out(events: Sequence[tuple[float, str]]) -> list[Piece]:
    """Where and when each piece appears, long pauses shortened.

    Raises:
        ValueError: The text moves the cursor.
    """
    pieces: list[Piece] = []
    row = column = 0
    classes = ""
    shown_s = last_s = 0.0
    for at_s, data in events:
        if _CONTROL.search(data) or "\b" in data:
            raise ValueError(f"only text, line ends and colours can be drawn, not {data!r}")
        if at_s - last_s > MERGED_S:
            shown_s += min(at_s - last_s, PAUSE_MAX_S)
            last_s = at_s
        for index, part in enumerate(_ESCAPE.split(data)):
            if index % 2:
                classes = _next_classes(classes, part)
                continue
            for line_index, line in enumerate(part.replace("\r", "").split("\n")):
                if line_index:
                    row, column = row + 1, 0
                if line.strip():
                    pieces.append(Piece(shown_s, row, column, line, classes))
                column += len(line)
    return pieces


def _next_classes(classes: str, codes: str) -> str:
    present = set(classes.split())
    for code in map(int, (codes or "0").split(";")):
        if code == 0:
            present.clear()
        elif code in _CLASSES:
            present.add(_CLASSES[code])
    return " ".join(sorted(present))


def draw(pieces: Sequence[Piece], title: str) -> str:
    """The SVG. Each piece is hidden until its moment; then all begins again."""
    whole_s = pieces[-1].at_s + HOLD_S
    width = COLUMNS * CELL_WIDTH + 2 * PADDING
    height = (pieces[-1].row + 1) * LINE_HEIGHT + 2 * PADDING
    moments = sorted({piece.at_s for piece in pieces})
    keyframes = "\n".join(
        _keyframes(index, 100 * at_s / whole_s, whole_s) for index, at_s in enumerate(moments) if at_s > 0
    )
    texts = "\n".join(_text(piece, moments.index(piece.at_s)) for piece in pieces)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" xml:space="preserve">
<title>{escape(title)}</title>
<style>
{_STYLE}
{keyframes}
</style>
<rect width="100%" height="100%" rx="10" fill="#1b1f27"/>
{texts}
</svg>
"""


def _keyframes(index: int, percent: float, whole_s: float) -> str:
    hidden, shown = f"{percent:.3f}%", f"{percent + 0.001:.3f}%"
    animation = f".k{index}{{animation:k{index} {whole_s:.2f}s infinite}}"
    return f"@keyframes k{index}{{0%,{hidden}{{opacity:0}}{shown}{{opacity:1}}}}{animation}"


def _text(piece: Piece, moment: int) -> str:
    text = piece.text.rstrip()
    indent = len(text) - len(text.lstrip())
    x = PADDING + (piece.column + indent) * CELL_WIDTH
    y = PADDING + piece.row * LINE_HEIGHT + FONT_SIZE
    length = (len(text) - indent) * CELL_WIDTH
    classes = f"{piece.classes} k{moment}".strip()
    body = escape(text.lstrip())
    return f'<text x="{x:.1f}" y="{y:.1f}" textLength="{length:.1f}" class="{classes}">{body}</text>'


def main() -> None:
    """Record and draw."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.recording", description=__doc__)
    parser.add_argument("svg", type=Path, help="where the picture goes")
    parser.add_argument("command", nargs="+", help="what to run")
    parser.add_argument("--prompt", default="make demo", help="what is shown as typed")
    arguments = parser.parse_args()
    typed = [(0.0, f"\x1b[2m$\x1b[0m {arguments.prompt}\n")]
    events = [(at_s + 1.0, text) for at_s, text in record(arguments.command)]
    title = f"A terminal: {arguments.prompt}"
    arguments.svg.write_text(draw(lay_out([*typed, *events]), title), encoding="utf-8")
    sys.stdout.write(f"{arguments.svg}\n")


if __name__ == "__main__":
    main()
