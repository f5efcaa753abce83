"""Noticing that the parent is gone. How a process ends then is tested with real ones in tests/e2e."""

from __future__ import annotations

import threading

from shared.parent_watch import ParentWatch


def test_nothing_happens_while_the_parent_lives() -> None:
    """A signal may make us look at any time; the same parent is no reason to end."""
    gone: list[int] = []
    watch = ParentWatch(parent=7, gone=lambda: gone.append(1), read_parent=lambda: 7)
    assert not watch.check()
    assert gone == []


def test_orphan_is_told_once() -> None:
    """Whoever adopts us, we end, and only once."""
    gone: list[int] = []
    watch = ParentWatch(parent=7, gone=lambda: gone.append(1), read_parent=lambda: 1)
    assert watch.check()
    assert watch.check()
    assert gone == [1]


def test_watch_runs_until_the_parent_changes() -> None:
    """The polling thread ends with what it watches for."""
    parents = iter([7, 1])
    gone = threading.Event()
    watch = ParentWatch(parent=7, gone=gone.set, read_parent=lambda: next(parents))
    thread = threading.Thread(target=watch.run)
    thread.start()
    assert gone.wait(5)
    thread.join(5)
    assert not thread.is_alive()
