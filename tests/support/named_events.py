"""Streams of named server-sent events, split into their events; what line splitters depend on is checked."""

from __future__ import annotations

import json
from typing import Any


def split_events(body: bytes) -> tuple[list[dict[str, Any]], int]:
    """The events in order, and how many comments there were.

    Raises:
        AssertionError: Naming what is wrong.
    """
    text = body.decode("utf-8")
    assert text.endswith("\n\n") or not text, f"unfinished event: {text[-80:]!r}"
    assert "\r" not in text, "LF only"
    events, comments = [], 0
    for frame in text.split("\n\n")[:-1]:
        if frame.startswith(":"):
            assert len(frame.splitlines()) == 1
            comments += 1
            continue
        lines = frame.splitlines()
        assert len(lines) == 2, f"an event is two lines for every splitter: {frame!r}"
        assert lines[0].startswith("event: "), f"not named: {frame!r}"
        assert lines[1].startswith("data: "), f"no data: {frame!r}"
        event = json.loads(lines[1].removeprefix("data: "))
        assert event["type"] == lines[0].removeprefix("event: "), f"named otherwise: {frame!r}"
        events.append(event)
    return events, comments
