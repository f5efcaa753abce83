"""Shows progress where it is read: bars on a terminal, lines in a log, JSON for a parent process."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from shared.models.progress import Progress

LINE_INTERVAL_S = 5.0
"""How often a log without a terminal hears of the same task: often enough to see that it lives."""


class Display(Protocol):
    """Where progress and messages go."""

    def show(self, progress: Progress) -> None:
        """Show how far a task is. Callable from any thread."""

    def say(self, message: str) -> None:
        """Print a line, above the bars if there are any."""


class JsonDisplay:
    """One JSON line per report, flushed, on standard output."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, progress: Progress) -> None:
        """Write the report as it is."""
        self._stream.write(progress.to_json() + "\n")
        self._stream.flush()

    def say(self, message: str) -> None:
        """A line that is no JSON: the parent passes it on."""
        self._stream.write(message + "\n")
        self._stream.flush()


class LineDisplay:
    """A line when a task starts, every `LINE_INTERVAL_S` while it runs, and when it ends."""

    def __init__(self, stream: TextIO, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._monotonic = monotonic
        self._next_s: dict[str, float] = {}
        self._finished: set[str] = set()

    def show(self, progress: Progress) -> None:
        """Write a line if it is time for one."""
        if progress.unit == "note":
            self.say(progress.task)
            return
        now = self._monotonic()
        if progress.task in self._finished:
            return
        if progress.is_finished:
            self._finished.add(progress.task)
        elif now < self._next_s.get(progress.task, 0.0):
            return
        self._next_s[progress.task] = now + LINE_INTERVAL_S
        amount = amount_text(progress)
        self.say(f"{progress.task}: {amount}" if amount else f"{progress.task} …")

    def say(self, message: str) -> None:
        """Write the line."""
        self._stream.write(message + "\n")
        self._stream.flush()


class BarDisplay:
    """One rich bar per task, in the order in which they began."""

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._ids: dict[str, TaskID] = {}

    def show(self, progress: Progress) -> None:
        """Create or move the task's bar."""
        if progress.unit == "note":
            self.say(progress.task)
            return
        total = progress.total or None
        task_id = self._ids.get(progress.task)
        if task_id is None:
            task_id = self._bars.add_task(progress.task, total=total)
            self._ids[progress.task] = task_id
        self._bars.update(task_id, completed=progress.done, total=total, amount=amount_text(progress))

    def say(self, message: str) -> None:
        """Print above the bars."""
        self._bars.console.print(message, highlight=False, markup=False, soft_wrap=True)


class _AmountColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get("amount", "")))


def amount_text(progress: Progress) -> str:
    """For example ``212.4 MB of 491.4 MB (43%)``; empty while nothing can be counted."""
    if not progress.total or progress.unit == "steps":
        return "done" if progress.is_finished else ""
    percent = f"{100 * progress.done // progress.total}%"
    if progress.unit == "bytes":
        return f"{decimal(progress.done)} of {decimal(progress.total)} ({percent})"
    return f"{progress.done} of {progress.total} {progress.unit} ({percent})"


@contextlib.contextmanager
def open_display(*, as_json: bool = False, stream: TextIO | None = None) -> Iterator[Display]:
    """The display that fits the stream (standard error unless told), for as long as the block runs."""
    if as_json:
        yield JsonDisplay(stream or sys.stdout)
        return
    console = Console(file=stream or sys.stderr)
    if not console.is_terminal:
        yield LineDisplay(stream or sys.stderr)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), _AmountColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=console, refresh_per_second=8) as bars:
        yield BarDisplay(bars)
