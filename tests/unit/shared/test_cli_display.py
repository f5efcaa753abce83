"""Progress for a terminal, for a log, and for a parent process."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress as RichProgress

from shared.cli.display import LINE_INTERVAL_S, BarDisplay, JsonDisplay, LineDisplay, amount_text, open_display
from shared.models.progress import Progress


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


def test_progress_travels_as_a_json_line():
    """What one process writes another reads; any other line is no progress."""
    progress = Progress("Reading weights", 3, 291, "tensors")
    assert Progress.from_json(progress.to_json()) == progress
    assert Progress.from_json("a log line") is None
    assert Progress.from_json('{"event": "x"}') is None
    assert Progress.from_json("[1]") is None


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress("x", 212_400_000, 491_400_064), "212.4 MB of 491.4 MB (43%)"),
        (Progress("x", 12, 291, "tensors"), "12 of 291 tensors (4%)"),
        (Progress("x", 0, 0), ""),
        (Progress("x", 0, 0, "steps"), ""),
        (Progress("x", 1, 1, "steps"), "done"),
    ],
)
def test_amounts_read_well(progress: Progress, text: str):
    """Sizes as people say them."""
    assert amount_text(progress) == text


def test_a_log_hears_of_a_task_now_and_then():
    """A line at the start, one per interval, one at the end, and none after it."""
    clock, stream = Clock(), io.StringIO()
    display = LineDisplay(stream, clock)
    for done in range(11):
        display.show(Progress("Downloading x", done, 10, "tensors"))
        clock.now_s += LINE_INTERVAL_S / 5
    display.show(Progress("Downloading x", 10, 10, "tensors"))
    assert stream.getvalue().splitlines() == [
        "Downloading x: 0 of 10 tensors (0%)",
        "Downloading x: 5 of 10 tensors (50%)",
        "Downloading x: 10 of 10 tensors (100%)",
    ]


def test_a_log_hears_of_work_that_cannot_be_counted():
    """Not silence."""
    stream = io.StringIO()
    LineDisplay(stream).show(Progress("Reading tokenizer", unit="steps"))
    assert stream.getvalue() == "Reading tokenizer …\n"


def test_notes_are_printed_once_each():
    """On every kind of display."""
    note = Progress("the hub cannot be reached", unit="note")
    stream = io.StringIO()
    LineDisplay(stream).show(note)
    assert stream.getvalue() == "the hub cannot be reached\n"
    stream = io.StringIO()
    with RichProgress(console=Console(file=stream, force_terminal=True, width=100)) as bars:
        BarDisplay(bars).show(note)
        assert not bars.tasks
    assert "the hub cannot be reached" in stream.getvalue()


def test_a_parent_process_gets_json():
    """One line per report."""
    stream = io.StringIO()
    JsonDisplay(stream).show(Progress("x", 1, 2))
    JsonDisplay(stream).say("words")
    lines = stream.getvalue().splitlines()
    assert Progress.from_json(lines[0]) == Progress("x", 1, 2)
    assert lines[1] == "words"


def test_a_terminal_gets_one_bar_per_task():
    """The same task moves the same bar; a total may become known later."""
    with RichProgress(console=Console(file=io.StringIO(), force_terminal=True)) as bars:
        display = BarDisplay(bars)
        display.show(Progress("a", 0, 0))
        display.show(Progress("b", 1, 4))
        display.show(Progress("a", 5, 10))
        assert [(task.description, task.completed, task.total) for task in bars.tasks] == [("a", 5, 10), ("b", 1, 4)]


def test_a_task_that_has_ended_stops_its_bar():
    """Also one that could not be counted, or not to its end: the bar is full and its clock stands."""
    with RichProgress(console=Console(file=io.StringIO(), force_terminal=True)) as bars:
        display = BarDisplay(bars)
        display.show(Progress("a", 97, 100))
        display.show(Progress("b"))
        assert not any(task.finished for task in bars.tasks)
        for name in ("a", "b"):
            display.show(Progress.finished(name))
        assert all(task.finished and task.fields["amount"] == "done" for task in bars.tasks)


def test_the_stream_decides_the_display():
    """Bars only where somebody sees them."""
    with open_display(stream=io.StringIO()) as display:
        assert isinstance(display, LineDisplay)
    with open_display(as_json=True, stream=io.StringIO()) as display:
        assert isinstance(display, JsonDisplay)
