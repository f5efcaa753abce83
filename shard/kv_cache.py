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
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Literal, Protocol

from shared.clock import Clock
from shared.errors import CacheMissed, CacheMissReason, StepFailed
from shared.layers import LayerRange
from shared.messages import SamplingParams, Step

GONE_SESSIONS_MAX = 1024
"""How many lost sessions are remembered with the reason, so that the miss can say it; older ones are `unknown`."""

DropCause = Literal["expired", "evicted", "released", "cancelled", "failed"]
"""Why a session is no longer held; the keys of `NodeStats.evictions`."""

_MISS_REASONS: dict[DropCause, CacheMissReason] = {"expired": "expired", "evicted": "evicted"}
"""Causes that a later miss names; a session ended on purpose or by a failed step is `unknown`."""


class HeldCache(Protocol):
    """What the store needs to know of a stage's cache."""

    @property
    def length(self) -> int:
        """Positions held."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes allocated, which may be more than the positions fill."""
        ...


@dataclass(slots=True, eq=False)
class Session:
    """One session: its cache and what a step must name to continue it.

    Args:
        session: Its id, unique across gateways.
        layers: The range its cache covers.
        model: Fingerprint of the model it belongs to.
        cache: Owned by the compute thread while the session is open.
        epoch: Highest epoch that has touched it.
        step_index: The step applied last.
        sampling: What a decode without `sampling` uses.
        length: Positions held at the last commit.
        nbytes: Bytes counted at the last commit.
        used_at: Clock of the last open or commit.
        pinned: Whether a step has it open.
        dropped: Set when it was released while open.
    """

    session: str
    layers: LayerRange
    model: str
    cache: HeldCache
    epoch: int
    step_index: int
    sampling: SamplingParams | None
    length: int = 0
    nbytes: int = 0
    used_at: float = 0.0
    pinned: bool = False
    dropped: bool = False


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
            StepFailed: `stale_epoch`: a higher epoch has touched the session.
        """
        with self._lock:
            self._expire()
            held = self._listed.get(step.session)
            if held is None:
                raise CacheMissed(self._gone.get(step.session, "unknown"), session=step.session)
            _check_epoch(held, step)
            reason = _mismatch(held, step)
            if reason is not None:
                raise CacheMissed(reason, session=step.session, held_len=held.length)
            if held.pinned:
                raise StepFailed("session_busy", "another step of this session is running", session=step.session)
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
                _check_epoch(held, step)
                _check_new(held, step)
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


def _check_epoch(held: Session, step: Step) -> None:
    if step.epoch < held.epoch:
        raise StepFailed(
            "stale_epoch",
            f"epoch {step.epoch} is below {held.epoch}, which the session has seen",
            field="epoch",
            limit=held.epoch,
        )


def _check_new(held: Session, step: Step) -> None:
    if step.epoch == held.epoch and step.step_index <= held.step_index:
        raise StepFailed(
            "duplicate_step",
            f"step_index {step.step_index} of epoch {step.epoch} is not after {held.step_index}, which was applied",
            field="step_index",
            limit=held.step_index,
        )


def _mismatch(held: Session, step: Step) -> CacheMissReason | None:
    if step.model != held.model:
        return "model_mismatch"
    if step.layers != held.layers:
        return "range_mismatch"
    if step.past_len != held.length:
        return "past_len_mismatch"
    return None
