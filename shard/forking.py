"""Copying a session, so that several answers go on from one prefill."""

from __future__ import annotations

from shard.drawing import Drawing, NewMatcher
from shard.kv_cache import SessionStore
from shard.session import Session
from shard.step_check import bad_step
from shard.step_queue import QueuedFork
from shared.errors import StepFailed


def fork_session(store: SessionStore, item: QueuedFork, new_matcher: NewMatcher | None) -> None:
    """Copy a session as it stands. On the compute thread, between steps: copying takes as long as its bytes do.

    Args:
        store: Holds the session, and takes the copy.
        item: Which, and where to.
        new_matcher: For a copy with another grammar; None on a hop that draws nothing.

    Raises:
        CacheMissed: The store does not hold exactly what the fork names.
        StepFailed: There is no room, the fork was cancelled, or the copy's sampling cannot go on from here.
    """
    source, copy = store.open_fork(item.fork)
    try:
        _check_wanted(item)
        copy.drawing = _copy_drawing(source, copy, new_matcher)
        copy.cache = source.cache.copy()
    except BaseException:
        store.abort_fork(source, copy)
        raise
    store.commit_fork(source, copy)


def _check_wanted(item: QueuedFork) -> None:
    if item.cancelled:
        raise StepFailed("cancelled", "the copy was released before it was made")


def _copy_drawing(source: Session, copy: Session, new_matcher: NewMatcher | None) -> Drawing | None:
    """The original's history, under the copy's own parameters."""
    if new_matcher is None or copy.sampling is None or not copy.sampling.needs_history:
        return None
    if source.drawing is None:
        raise bad_step("sampling", "needs the tokens before, and the session to copy was not given them")
    return source.drawing.copy(source.length, copy.sampling, new_matcher)
