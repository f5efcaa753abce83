"""The sessions a node holds: exactly which, for how long, and within which memory.

Theory of operation. A session is *listed* once a prefill has been committed; a decode finds it only
if it is listed at exactly the position, range and model that the step names. A step first *opens* a
session, which pins it, then computes, then *commits* or *aborts*:

============  ==========================  ===============================  =========================
opened by     while open                  commit                           abort
============  ==========================  ===============================  =========================
``prefill``   not listed; whatever held   listed in place of the old one   forgotten; the old one
              the id before stays listed                                   stays as it was
``decode``    listed and pinned           listed at its new position       dropped: half a step may
                                                                           be in its cache
============  ==========================  ===============================  =========================

A pinned session is never evicted or expired. A release or cancel that meets an open session takes
effect at once for lookups, and its memory goes when the step commits or aborts. Time to live, the
session limit and the byte budget are applied whenever a session is opened or committed and by `sweep`.

The store is shared by the compute thread (open, commit, abort) and the event loop (release, sweep,
figures), so each public method holds a lock; none of them computes or waits.

A *fork* opens two sessions, the one to copy and the copy, which is listed once its caches are copied.
It takes no other session's place: where there is no room it is refused.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import Literal

from shard.session import HeldCache, Session, check_epoch, check_new, mismatch
from shared.clock import Clock
from shared.errors import CacheMissed, CacheMissReason, StepFailed
from shared.messages import Fork, Step

GONE_SESSIONS_MAX = 1024
"""How many lost sessions are remembered with the reason, so that the miss can say it; older ones are `unknown`."""

DropCause = Literal["expired", "evicted", "released", "cancelled", "failed"]
"""Why a session is no longer held; the keys of `NodeStats.evictions`."""

_MISS_REASONS: dict[DropCause, CacheMissReason] = {"expired": "expired", "evicted": "evicted"}
"""Causes that a later miss names; a session ended on purpose or by a failed step is `unknown`."""


class SessionStore:
    """Holds sessions within a time to live, a number and a byte budget.

    Args:
        ttl_s: An untouched session is gone after this long.
        sessions_max: At most this many; the least recently used goes first.
        bytes_max: Budget of all caches as allocated. It is applied when a step commits, so what a
            running step adds may exceed it until then.
        clock: Monotonic time.
    """

    def __init__(self, *, ttl_s: float, sessions_max: int, bytes_max: int, clock: Clock) -> None:
        self.ttl_s = ttl_s
        self.sessions_max = sessions_max
        self.bytes_max = bytes_max
        self._clock = clock
        self._lock = threading.Lock()
        self._listed: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self._prefilling: dict[str, Session] = {}
        self._gone: OrderedDict[str, CacheMissReason] = OrderedDict()
        self._nbytes = 0
        self._drops: Counter[str] = Counter()

    def lookup(self, step: Step) -> Session:
        """Open the session that a `decode` continues.

        The caller must `commit` or `abort` what it gets.

        Raises:
            CacheMissed: Anything but exactly this session, range, model and position is held.
            StepFailed: `stale_epoch`: a higher epoch has touched the session; `session_busy`; `duplicate_step` when it
                goes back and this very step has been applied.
        """
        with self._lock:
            self._expire()
            held = self._held_for(step, step.session)
            if step.rewind_from is not None:
                check_new(held, step)
            held.pinned = True
            self._touch(held)
            return held

    def start(self, step: Step, cache: HeldCache) -> Session:
        """Open a new session for a `prefill`; nothing is replaced until `commit`.

        Raises:
            StepFailed: `stale_epoch`, or `duplicate_step` when this very prefill has been applied.
        """
        with self._lock:
            self._expire()
            held = self._listed.get(step.session)
            if held is not None:
                check_epoch(held, step)
                check_new(held, step)
            opened = Session(
                session=step.session,
                layers=step.layers,
                model=step.model,
                cache=cache,
                epoch=step.epoch,
                step_index=step.step_index,
                sampling=step.sampling,
                pinned=True,
            )
            self._prefilling[step.session] = opened
            return opened

    def commit(self, opened: Session, step: Step) -> bool:
        """The step is in the cache: list the session at its new position and apply the limits.

        Returns:
            Whether the session is held now; it is not if it was released meanwhile.

        Raises:
            StepFailed: `kv_budget_exceeded`: this session alone is larger than the whole budget; it is dropped.
        """
        with self._lock:
            self._unpin(opened)
            if opened.dropped:
                return False
            nbytes = opened.cache.nbytes
            if nbytes > self.bytes_max:
                self._discard(opened)
                raise StepFailed(
                    "kv_budget_exceeded",
                    f"the session takes {nbytes} bytes at {opened.cache.length} positions, "
                    f"the limit kv_bytes_max is {self.bytes_max}",
                    field="kv_bytes_max",
                    limit=self.bytes_max,
                )
            self._list(opened, step, nbytes)
            self._expire()
            self._evict()
            return True

    def open_fork(self, fork: Fork) -> tuple[Session, Session]:
        """Open the session that a fork names, and a copy of it whose `cache` is still the original's.

        The caller gives the copy a cache of its own and must `commit_fork` or `abort_fork` both. What the copy's id
        named before is forgotten already: it must not be taken for the copy.

        Raises:
            CacheMissed: Anything but exactly this session, range, model and position is held.
            StepFailed: `bad_step` when it would copy a session onto itself; `stale_epoch`; `session_busy`;
                `sessions_full` and `kv_budget_exceeded` where the copy would take another session's place.
        """
        if fork.target == fork.session:
            raise StepFailed("bad_step", "target must be another session", field="target")
        with self._lock:
            self._expire()
            replaced = self._listed.get(fork.target)
            if replaced is not None:
                check_epoch(replaced, fork)
                if replaced.pinned:
                    raise _busy(fork.target)
                self._drop(replaced, "released")
            source = self._held_for(fork, fork.session)
            self._check_room(source)
            source.pinned = True
            self._touch(source)
            copy = Session(
                session=fork.target,
                layers=source.layers,
                model=source.model,
                cache=source.cache,
                epoch=fork.epoch,
                step_index=-1,
                sampling=fork.sampling or source.sampling,
                pinned=True,
            )
            self._prefilling[fork.target] = copy
            return source, copy

    def commit_fork(self, source: Session, copy: Session) -> bool:
        """The copy is complete: list it. Returns whether it is held now; it is not if it was released meanwhile."""
        with self._lock:
            source.pinned = False
            self._unpin(copy)
            if copy.dropped:
                return False
            copy.length, copy.nbytes = copy.cache.length, copy.cache.nbytes
            self._nbytes += copy.nbytes
            self._listed[copy.session] = copy
            self._gone.pop(copy.session, None)
            self._touch(copy)
            return True

    def abort_fork(self, source: Session, copy: Session) -> None:
        """There is no copy; the original stays as it was."""
        with self._lock:
            source.pinned = False
            self._unpin(copy)

    def put_back(self, opened: Session) -> None:
        """The step was refused before anything was computed: the session stays as it was."""
        with self._lock:
            self._unpin(opened)

    def abort(self, opened: Session, cause: DropCause) -> None:
        """The step failed or was cancelled: forget a prefill, drop a decoding session."""
        with self._lock:
            self._unpin(opened)
            if self._listed.get(opened.session) is opened:
                self._drop(opened, cause)

    def release(self, session: str, cause: DropCause = "released") -> bool:
        """Free a session, also one that a running step has open. Returns whether there was one."""
        with self._lock:
            prefilling = self._prefilling.get(session)
            if prefilling is not None:
                prefilling.dropped = True
            held = self._listed.get(session)
            if held is not None:
                held.dropped = True
                self._drop(held, cause)
            self._gone.pop(session, None)
            return held is not None or prefilling is not None

    def sweep(self) -> None:
        """Apply time to live and limits, so that an idle node gives memory back."""
        with self._lock:
            self._expire()
            self._evict()

    def holds(self, session: str) -> bool:
        """Whether a session is listed."""
        with self._lock:
            return session in self._listed

    def figures(self) -> tuple[int, int, dict[str, int]]:
        """Sessions held, bytes held, and sessions dropped by cause."""
        with self._lock:
            return len(self._listed), self._nbytes, dict(self._drops)

    # The methods below are called with the lock held.

    def _held_for(self, wanted: Step | Fork, session: str) -> Session:
        held = self._listed.get(session)
        if held is None:
            raise CacheMissed(self._gone.get(session, "unknown"), session=session)
        if isinstance(wanted, Step):  # a fork's epoch is the copy's
            check_epoch(held, wanted)
        reason = mismatch(held, wanted)
        if reason is not None:
            raise CacheMissed(reason, session=session, held_len=held.length)
        if held.pinned:
            raise _busy(session)
        return held

    def _check_room(self, source: Session) -> None:
        if len(self._listed) >= self.sessions_max:
            raise StepFailed("sessions_full", f"the node holds as many sessions as it may: {self.sessions_max}")
        if self._nbytes + source.nbytes > self.bytes_max:
            raise StepFailed("kv_budget_exceeded", f"with the copy, sessions would take over {self.bytes_max} bytes")

    def _unpin(self, opened: Session) -> None:
        if not opened.pinned:
            raise ValueError(f"session {opened.session} is not open")
        opened.pinned = False
        if self._prefilling.get(opened.session) is opened:
            del self._prefilling[opened.session]

    def _list(self, opened: Session, step: Step, nbytes: int) -> None:
        replaced = self._listed.get(opened.session)
        if replaced is not None:
            self._nbytes -= replaced.nbytes
        opened.epoch = step.epoch
        opened.step_index = step.step_index
        opened.sampling = step.sampling or opened.sampling
        opened.length = opened.cache.length
        opened.nbytes = nbytes
        self._nbytes += nbytes
        self._listed[opened.session] = opened
        self._gone.pop(opened.session, None)
        self._touch(opened)

    def _touch(self, held: Session) -> None:
        held.used_at = self._clock.monotonic()
        self._listed.move_to_end(held.session)

    def _discard(self, opened: Session) -> None:
        held = self._listed.get(opened.session)
        if held is opened:
            self._drop(opened, "evicted")
        elif held is None:
            self._drops["evicted"] += 1
            self._remember(opened.session, "evicted")

    def _drop(self, held: Session, cause: DropCause) -> None:
        del self._listed[held.session]
        self._nbytes -= held.nbytes
        self._drops[cause] += 1
        reason = _MISS_REASONS.get(cause)
        if reason is not None:
            self._remember(held.session, reason)

    def _remember(self, session: str, reason: CacheMissReason) -> None:
        self._gone[session] = reason
        self._gone.move_to_end(session)
        while len(self._gone) > GONE_SESSIONS_MAX:
            self._gone.popitem(last=False)

    def _expire(self) -> None:
        oldest_allowed = self._clock.monotonic() - self.ttl_s
        for held in list(self._listed.values()):
            if held.used_at > oldest_allowed:
                return
            if not held.pinned:
                self._drop(held, "expired")

    def _evict(self) -> None:
        for held in list(self._listed.values()):
            if len(self._listed) <= self.sessions_max and self._nbytes <= self.bytes_max:
                return
            if not held.pinned:
                self._drop(held, "evicted")


def _busy(session: str) -> StepFailed:
    return StepFailed("session_busy", "another step of this session is running", session=session)
