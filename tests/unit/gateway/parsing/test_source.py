"""Reading text that arrives in pieces."""

from __future__ import annotations

import re

import pytest

from gateway.parsing.source import SPACE_CHARS_MAX, CutOff, Malformed, Markers, Parse, Source


def run(steps: Parse[object], source: Source, pieces: list[str]) -> object:
    """Run a read over pieces and return its result."""
    for piece in [*pieces, None]:
        source.end() if piece is None else source.feed(piece)
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value
    raise AssertionError("the read waits after the text has ended")


@pytest.mark.parametrize("literals", [("",), ("<a", "<a>"), ("b", "abc")])
def test_markers_that_could_be_found_too_early_are_refused(literals: tuple[str, ...]) -> None:
    """A literal within another would be complete before the one that began first."""
    with pytest.raises(ValueError, match="marker"):
        Markers(*literals)


@pytest.mark.parametrize(("text", "held"), [("a <", 2), ("a <tool", 6), ("a <x", 0), ("a", 0), ("a \n ", 3)])
def test_only_what_may_become_a_marker_is_held_back(text: str, held: int) -> None:
    """The beginning of a marker, and the white space before it, wait; other text does not."""
    assert len(text) - Markers("<tool_call>", trim=True).undecided(text, 0) == held


def test_white_space_before_a_marker_is_bounded() -> None:
    """More white space than a marker may own is text, so that little is ever held back."""
    source, given = Source(), []
    steps = source.until(Markers("<x>", trim=True), given.append)
    spaces = " " * (SPACE_CHARS_MAX + 10)
    assert run(steps, source, [*spaces, "<x>"]) == "<x>"
    assert "".join(given) == " " * 10
    assert source.space_before == " " * SPACE_CHARS_MAX


def test_a_read_returns_as_soon_as_later_text_cannot_change_it() -> None:
    """`accept` of a literal does not wait for text that is no part of it."""
    source = Source()
    source.feed("<toot")
    with pytest.raises(StopIteration) as stop:
        next(source.accept("<tool>"))
    assert stop.value.value == ""


def test_a_head_without_its_marker_is_left_unread() -> None:
    """Text that is too long for a head goes elsewhere whole, wherever it was cut."""
    for pieces in (["abcdefgh>"], list("abcdefgh>")):
        source = Source()
        with pytest.raises(Malformed):
            run(source.head(Markers(">"), 4), source, pieces)
        assert source.rest().startswith("abcde")


def test_a_head_that_the_text_cuts_is_cut_off() -> None:
    """The end of the text is not a malformation."""
    source = Source()
    with pytest.raises(CutOff):
        run(source.head(Markers(">"), 4), source, ["ab"])


def test_expect_tells_a_cut_literal_from_another_text() -> None:
    """Half a literal at the end of the text could have become whole."""
    for text, error in (("<en", CutOff), ("<ex", Malformed)):
        source = Source()
        with pytest.raises(error):
            run(source.expect("<end>"), source, [text])


def test_a_word_has_a_longest_length() -> None:
    """A name that does not end is not kept for ever."""
    source = Source()
    with pytest.raises(Malformed):
        run(source.word(re.compile(r"\w"), 3), source, ["abcd"])
