"""The recording in the README is drawn as the terminal showed it."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET

import pytest

from tests.support.recording import HOLD_S, PAUSE_MAX_S, Piece, draw, lay_out, record

SVG = "{http://www.w3.org/2000/svg}"


def test_pieces_have_their_place_time_and_style():
    """Columns count on within a line; a colour holds until it is taken back; long pauses are shortened."""
    pieces = lay_out([(0.0, "a\x1b[1;31mb"), (1.0, "c\x1b[0m d\r\n"), (61.0, "e")])
    assert pieces == [
        Piece(0.0, 0, 0, "a", ""),
        Piece(0.0, 0, 1, "b", "b r"),
        Piece(1.0, 0, 2, "c", "b r"),
        Piece(1.0, 0, 3, " d", ""),
        Piece(1.0 + PAUSE_MAX_S, 1, 0, "e", ""),
    ]


@pytest.mark.parametrize("data", ["\x1b[2K", "\x1b[1A", "a\b"])
def test_what_moves_the_cursor_is_refused(data: str):
    """Rather than drawn wrongly."""
    with pytest.raises(ValueError, match="only text"):
        lay_out([(0.0, data)])


def test_the_picture_is_an_svg_that_shows_everything_at_its_end():
    """Every piece is an element, escaped; only the animation hides it, so without one all of it is seen."""
    picture = draw([Piece(0.0, 0, 0, "$ x", ""), Piece(2.0, 1, 2, " <&> ", "g")], "title")
    root = ET.fromstring(picture)
    assert [(text.text, text.get("class")) for text in root.iter(f"{SVG}text")] == [("$ x", "k0"), ("<&>", "g k1")]
    assert "opacity" not in picture.replace("{opacity:0}", "").replace("{opacity:1}", "")
    assert f".k1{{animation:k1 {2.0 + HOLD_S:.2f}s infinite}}" in picture
    assert "k0{" not in picture


def test_a_command_is_recorded_in_a_terminal():
    """It believes in one, and what it prints comes whole."""
    source = "import sys; print(sys.stdout.isatty(), 'é' * 3)"
    assert "".join(text for _, text in record([sys.executable, "-c", source])) == "True ééé\r\n"
