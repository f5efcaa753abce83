"""How `meshnet demo` writes: within margins, and a note never in the middle of a line."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shared.cli.demo import Answer
from shared.cli.narrator import Narrator


@pytest.fixture
def page() -> io.StringIO:
    """What was written."""
    return io.StringIO()


def narrate(page: io.StringIO, width: int = 20) -> Narrator:
    """A narrator on a page without colours."""
    return Narrator(Console(file=page, width=width))


def test_streamed_text_is_broken_between_pieces(page: io.StringIO):
    """At the margin, without the space that stood there; the text's own line ends stay."""
    narrator = narrate(page)
    for piece in ["one", " two", " three", " four", " five", "\n", "six"]:
        narrator.stream(piece)
    narrator.note("end")
    assert page.getvalue() == "  one two three four\n  five\n  six\n  end\n"


def test_a_note_interrupts_and_the_text_goes_on_below(page: io.StringIO):
    """Whatever column the text had reached; markup in it is text."""
    narrator = narrate(page, 80)
    narrator.stream("in the [bold]middle[/bold] of")
    narrator.note("killed")
    narrator.stream(" a sentence")
    narrator.title("T")
    assert page.getvalue() == "  in the [bold]middle[/bold] of\n  killed\n  a sentence\n\nT\n\n"


def test_an_answer_is_summed_up():
    """Speed over the gaps, and the longest of them."""
    answer = Answer(["a", "b", "c"], at_s=[1.0, 1.5, 3.0])
    assert answer.text == "abc"
    assert answer.summary() == "3 pieces of text, 1.0 a second; the longest pause was 1.5 s"
    assert Answer(["a"], at_s=[1.0]).summary() == "1 piece of text"
