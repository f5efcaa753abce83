"""What a node holds: one layer range with the thread that computes it and the sessions on it, exchanged as a whole.

A range has a compute thread of its own, so that a node can go on serving one while it loads the next. Its life::

    loading ──▶ ready ──▶ (draining) ──▶ retired: no new steps, the running one ends, its memory goes back
       └──────▶ failed

Everything runs on the event loop but what is under "on the compute thread".
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from shard.assignment import Assignment, Loading, LoadRange, describe
from shard.compute import ComputeThread
from shard.executor import Executor, Outcome, StepFigures
from shard.kv_cache import SessionStore
from shard.memory_return import return_memory
from shard.room import Room
from shard.runner import Runner
from shard.settings import KvLimits
from shared.clock import Clock
from shared.errors import LoadFailed, MeshError

LOAD_PROGRESS_INTERVAL_S = 0.25
"""Bars move smoothly at four frames a second; a checkpoint may have thousands of tensors."""
LOAD_LOG_INTERVAL_S = 5.0
"""As above, for a log that people read."""
KV_MEMORY_SHARE = 0.25
"""Of the memory that is free once the weights are loaded, what sessions may take by default: there may be
other nodes on the machine, and a forward needs room too."""

log = structlog.stdlib.get_logger(__name__)


class RangeEvents(Protocol):
    """Who is told what happens to a range. The first is called on the compute thread, the others on the event loop."""

    def make_room(self, held: HeldRange, weight_bytes: int, measure: Callable[[], Room]) -> None:
        """Return once the weights may be read. May block; raises `LoadFailed`."""
        ...

    def on_progress(self, held: HeldRange, done_bytes: int, total_bytes: int) -> None:
        """So much has been fetched or read."""
        ...

    def on_loaded(self, held: HeldRange, error: str | None) -> None:
        """It can serve, or will not, for the reason given."""
        ...

    def deliver(self, outcomes: list[Outcome]) -> None:
        """Answers to steps."""
        ...


@dataclass(slots=True)
class RangeFigures:
    """What a range has done and holds."""

    sessions: int = 0
    kv_bytes: int = 0
    queued_steps: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    steps: StepFigures = field(default_factory=StepFigures)


class HeldRange:
    """One layer range. Needs a running event loop.

    Args:
        assignment: Which.
        node_id: Of the node that holds it.
        limits: What is kept of sessions.
        clock: Monotonic time.
        load: Loads it.
        events: Told what happens.
    """

    def __init__(
        self,
        assignment: Assignment,
        *,
        node_id: str,
        limits: KvLimits,
        clock: Clock,
        load: LoadRange,
        events: RangeEvents,
    ) -> None:
        self.assignment = assignment
        self.info = describe(assignment, node_id, limits)
        self.compute = ComputeThread(load=self._load, deliver=self._deliver, loaded=self._loaded, ended=self._ended)
        self.store: SessionStore | None = None
        self.kv_room_bytes: int | None = None
        self._executor: Executor | None = None
        self._runner: Runner | None = None
        self._limits = limits
        self._clock = clock
        self._load_runner = load
        self._events = events
        self._unwanted = threading.Event()
        self._loading = Loading(self._report, self._unwanted.is_set, self._make_room)
        self._memory_is_wanted = False
        self._progress_at = -LOAD_PROGRESS_INTERVAL_S
        self._progress_logged_at = -LOAD_LOG_INTERVAL_S
        self._loop = asyncio.get_running_loop()

    @property
    def can_serve(self) -> bool:
        """Whether steps are taken."""
        return self._executor is not None and self.info.state in ("ready", "draining")

    def start(self) -> None:
        """Begin to load."""
        self.compute.start()

    def become_ready(self) -> None:
        """It is loaded."""
        self.info = replace(self.info, state="ready")
        info = self.info
        log.info(
            "node.ready",
            layers=str(info.layers),
            device=info.device,
            dtype=info.dtype,
            kv_cache=info.kv_cache,
            kv_bytes_max=info.kv_bytes_max,
            kv_bytes_per_token=info.kv_bytes_per_token,
        )

    def become_failed(self) -> None:
        """It could not be loaded."""
        self.info = replace(self.info, state="failed")

    def become_draining(self) -> None:
        """Take no new session. What is still loading stops."""
        self.info = replace(self.info, state="draining")
        self._unwanted.set()
        if self._executor is not None:
            self._executor.refuses_new_sessions = True

    def stop(self) -> None:
        """Cancel what runs or loads, forget what waits. Does not wait."""
        self._unwanted.set()
        self.compute.stop()

    def release_references(self) -> None:
        """Let go of sessions and weights: their memory goes back once the compute thread ends."""
        self._memory_is_wanted = True
        self._executor = self._runner = None
        self.store = None

    def sweep(self) -> None:
        """Apply the limits that no step's arrival would."""
        if self.store is not None:
            self.store.sweep()

    def figures(self) -> RangeFigures:
        """This moment's."""
        sessions, kv_bytes, drops = self.store.figures() if self.store else (0, 0, {})
        steps = self._executor.figures() if self._executor else StepFigures()
        return RangeFigures(sessions, kv_bytes, self.compute.queued, Counter(drops), steps)

    def memory_figures(self) -> tuple[int, int, int]:
        """What the process has of its device's memory, what there is, and what the weights take; 0 until loaded."""
        runner = self._runner
        if runner is None:
            return 0, 0, 0
        return runner.memory_used_bytes(), runner.memory_limit_bytes, runner.weight_bytes

    # --- on the compute thread ---------------------------------------------------------------

    def _load(self) -> Executor:
        runner = self._load_runner(self.assignment, self._loading)
        if runner.layers != self.assignment.layers:
            raise ValueError(f"the stage holds {runner.layers}, not {self.assignment.layers}")
        if runner.num_layers != self.assignment.model.num_layers:
            message = f"the model has {runner.num_layers} layers, not {self.assignment.model.num_layers}"
            raise LoadFailed("weights_mismatch", message)
        return self._create_executor(runner)

    def _create_executor(self, runner: Runner) -> Executor:
        self._runner = runner
        keeps = self._limits.enabled and runner.supports_kv_cache
        bytes_max = self._limits.bytes_max or self._kv_budget(runner.memory_free_bytes())
        self.store = SessionStore(
            ttl_s=self._limits.ttl_s, sessions_max=self._limits.sessions_max, bytes_max=bytes_max, clock=self._clock
        )
        self.info = replace(
            self.info,
            device=runner.device,
            dtype=runner.dtype,
            quantize=runner.quantize,
            kv_cache=keeps,
            token_ids=runner.returns_token_ids,
            sampling=runner.sampling_fields,
            features=(*(_session_features(runner) if keeps else ()), *runner.features),
            kv_bytes_max=bytes_max,
            kv_bytes_per_token=runner.kv_bytes_per_token,
            context_len=runner.context_len or self.assignment.model.context_len,
            needs_token_ids=runner.needs_token_ids,
            refused_cuts=runner.refused_cuts,
        )
        store = self.store if self._limits.enabled else None
        model = self.assignment.model.fingerprint
        self._executor = Executor(runner=runner, store=store, model=model, clock=self._clock)
        return self._executor

    def _kv_budget(self, free_bytes: int) -> int:
        share_bytes = int(free_bytes * KV_MEMORY_SHARE)
        if self.kv_room_bytes is None:
            return share_bytes
        return max(1, min(free_bytes, self.kv_room_bytes))

    def _make_room(self, weight_bytes: int, measure: Callable[[], Room]) -> None:
        self._events.make_room(self, weight_bytes, measure)
        self._loading.check()

    def _report(self, done_bytes: int, total_bytes: int) -> None:
        self._loading.check()
        now = self._clock.monotonic()
        if done_bytes < total_bytes and now - self._progress_at < LOAD_PROGRESS_INTERVAL_S:
            return
        self._progress_at = now
        if done_bytes == total_bytes or now - self._progress_logged_at >= LOAD_LOG_INTERVAL_S:
            self._progress_logged_at = now
            log.info(
                "stage.loading", layers=str(self.assignment.layers), done_bytes=done_bytes, total_bytes=total_bytes
            )
        self.call(lambda: self._events.on_progress(self, done_bytes, total_bytes))

    def _ended(self) -> None:
        if self._memory_is_wanted:  # a process that ends gives it back anyway
            self.release_references()  # a load that was given up may have come to its end all the same
            return_memory()

    def _deliver(self, outcomes: list[Outcome]) -> None:
        self.call(lambda: self._events.deliver(outcomes))

    def _loaded(self, error: Exception | None) -> None:
        """The exception goes no further: its traceback would keep alive what has been read."""
        if error is not None and self._unwanted.is_set():
            return  # whatever it was, it was asked for
        reason = None if error is None else _log_failure(error, self.assignment)
        self._memory_is_wanted = self._memory_is_wanted or error is not None
        self.call(lambda: self._events.on_loaded(self, reason))

    def call(self, function: Callable[[], None]) -> None:
        """Have a function called on the event loop."""
        # A loop that has closed belongs to a node that has ended; nobody is there to be told.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)


def _log_failure(error: Exception, assignment: Assignment) -> str:
    layers = str(assignment.layers)
    if isinstance(error, MeshError):
        log.error("node.failed", layers=layers, code=error.code, reason=error.message)
        return error.message
    log.error("node.failed", layers=layers, reason=str(error), exc_info=error)
    return f"{type(error).__name__}: {error}"


def _session_features(runner: Runner) -> tuple[str, ...]:
    """What a node that keeps sessions can do with them."""
    return ("fork", "rewind") if runner.rewinds else ("fork",)
