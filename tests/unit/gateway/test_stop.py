"""Stop strings: nothing of them is shown, and nothing else is withheld."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stop import StopMatcher

LETTERS = st.text(alphabet="ab\n#", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n#", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """By definition: read character by character; the first completed stop string, the longest of them, ends it."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    """What comes out for each piece, and at the end."""
    matcher = StopMatcher(stops)
    shown = [matcher.push(piece) for piece in pieces]
    if matcher.matched is None:
        shown.append(matcher.flush())
    return shown, matcher.matched is not None


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=6))
def test_any_chunking_gives_the_text_before_the_first_stop_string(text: str, stops: list[str], cuts: list[int]):
    """The visible text is that of the definition, however the text was cut into pieces."""
    bounds = [0, *sorted(min(cut_at, len(text)) for cut_at in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    shown, matched = run(pieces, stops)
    assert ("".join(shown), matched) == cut(text, stops)


@given(text=LETTERS, stops=STOPS)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str]):
    """After each character the held text is a proper prefix of some stop string, or nothing."""
    matcher = StopMatcher(stops)
    shown = ""
    for index, char in enumerate(text):
        shown += matcher.push(char)
        if matcher.matched is not None:
            break
        held = text[len(shown) : index + 1]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_string_that_begins_in_mid_token_is_found():
    """The text of one token may hold the end of the answer and the beginning of the stop string."""
    assert run(["Hello wor", "ld! bye"], ["ld!"]) == (["Hello wor", ""], True)


def test_without_stop_strings_text_passes_at_once():
    """No stop strings, no delay."""
    matcher = StopMatcher(())
    assert matcher.push("abc") == "abc"
    assert matcher.flush() == ""


def test_after_a_match_nothing_more_is_shown():
    """Text that comes after the stop string is not part of the answer."""
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == "a"
    assert (matcher.push("c"), matcher.matched) == ("", ".")


def test_an_empty_stop_string_is_refused():
    """It would end every answer before it began."""
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_stop_string_is_part_of_the_text_where_that_is_asked(cut: int):
    """However the text is cut, all of it and nothing behind it."""
    matcher = StopMatcher(["END"], shown=True)
    text = "the END!"
    assert matcher.push(text[:cut]) + matcher.push(text[cut:]) == "the END"
    assert matcher.matched == "END"
