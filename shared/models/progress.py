"""Progress of long work, as values that any display can show and that travel between processes as JSON lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import orjson

Unit = Literal["bytes", "tensors", "steps", "note"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one piece of work has come.

    Args:
        task: What is being done, for people; the same text names the same bar.
        done: How much is finished.
        total: How much there is in all; 0 while that is unknown.
        unit: What `done` and `total` count; a ``note`` is a sentence to print once, nothing to measure.
    """

    task: str
    done: int = 0
    total: int = 0
    unit: Unit = "bytes"

    @classmethod
    def finished(cls, task: str) -> Progress:
        """The end of a task of which nothing is counted, or not to its end."""
        return cls(task, 1, 1, "steps")

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        return 0 < self.total <= self.done

    def to_json(self) -> str:
        """One line, without its end."""
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_json(cls, line: str) -> Progress | None:
        """Read what `to_json` wrote; None for any other line, so that a log may share the stream."""
        try:
            return cls(**orjson.loads(line))
        except (orjson.JSONDecodeError, TypeError):
            return None


ProgressSink = Callable[[Progress], None]
"""Called from the thread that works, at most a few times a second. Must not raise."""


def ignore_progress(_: Progress) -> None:
    """A sink for callers that show nothing."""
