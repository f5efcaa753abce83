"""The one thread that owns the model, and the queue through which the event loop feeds it.

The event loop never waits for the thread: it offers steps, drops them, or marks the running ones as
cancelled, all under a lock held for microseconds. The thread wakes the event loop once per list of
outcomes. Whatever a step does, the thread goes on. Forks go before all steps that wait: one of the copy may be
right behind.

The thread sleeps on a `SimpleQueue` of tokens, one for each step offered: it is written in C, and between a
result and the next step that saves some 50 microseconds over a `Condition`. A token whose step was dropped
only makes the thread look once in vain.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

import structlog

from shard.executor import Outcome, failure_message, failure_of
from shard.step_queue import QueuedFork, QueuedStep, StepQueue

FORKS_WAITING_MAX = 256
"""As many as steps may wait: more sessions than a node can hold."""
STEPS_AT_ONCE_MAX = 1
"""Steps given to the executor together. A stage runs a list one after the other, so a longer one would
only delay the first answer and let no decode step pass a prefill."""

log = structlog.stdlib.get_logger(__name__)


class RunsSteps(Protocol):
    """`shard.executor.Executor`, as the thread sees it."""

    def run(self, items: Sequence[QueuedStep]) -> list[Outcome]:
        """Answer each step, in order."""
        ...

    def fork(self, item: QueuedFork) -> None:
        """Copy a session."""
        ...


class ComputeThread:
    """Loads a stage and runs steps on it until stopped.

    Args:
        load: Called first, on the thread; may take minutes. What it returns runs the steps.
        deliver: Called on the thread with each list of outcomes; hands them to the event loop.
        loaded: Called on the thread when `load` has returned, or with the exception it raised,
            which ends the thread.
        ended: Called on the thread as its last act, when nothing on it refers to the stage any more.
    """

    def __init__(
        self,
        *,
        load: Callable[[], RunsSteps],
        deliver: Callable[[list[Outcome]], None],
        loaded: Callable[[Exception | None], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._load = load
        self._deliver = deliver
        self._loaded = loaded
        self._ended = ended
        self._queue = StepQueue()
        self._forks: deque[QueuedFork] = deque()
        self._forking: QueuedFork | None = None
        self._running: list[QueuedStep] = []
        self._lock = threading.Lock()
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="compute", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Cancel what runs, forget what waits, end the thread as soon as it notices. Does not wait."""
        with self._lock:
            self._stopping = True
            self._queue.drop(lambda _: True)
            self._forks.clear()
            for item in self._running:
                item.cancel("cancelled")
        self._tokens.put(None)

    def retire(self) -> list[QueuedStep]:
        """Let the running step end, and then the thread; what loads is not stopped. Does not wait.

        Returns:
            The steps that waited.
        """
        with self._lock:
            self._stopping = True
            self._forks.clear()
            waiting = self._queue.drop(lambda _: True)
        self._tokens.put(None)
        return waiting

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; returns whether it has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def fork(self, item: QueuedFork) -> bool:
        """Queue a fork. Returns whether there was room: a fork may be left out, at the price of a miss later."""
        with self._lock:
            if len(self._forks) >= FORKS_WAITING_MAX:
                return False
            self._forks.append(item)
        self._tokens.put(None)
        return True

    @property
    def pending(self) -> int:
        """Steps waiting or running."""
        with self._lock:
            return len(self._queue) + len(self._running)

    @property
    def queued(self) -> int:
        """Steps waiting."""
        with self._lock:
            return len(self._queue)

    def submit(self, item: QueuedStep) -> list[QueuedStep]:
        """Queue a step. Returns waiting steps of the same session and a lower epoch, which it replaces.

        A running step of a lower epoch is stopped: nobody waits for its answer any more.

        Raises:
            StepFailed: `queue_full`, naming the limit.
        """
        session, epoch = item.step.session, item.step.epoch

        def is_superseded(other: QueuedStep) -> bool:
            return other.step.session == session and other.step.epoch < epoch

        with self._lock:
            superseded = self._queue.drop(is_superseded)
            for running in filter(is_superseded, self._running):
                running.cancel("stale_epoch")
            self._queue.offer(item)
        self._tokens.put(None)
        return superseded

    def cancel(self, session: str) -> list[QueuedStep]:
        """Stop a session's running step at the next layer and return its waiting steps, now dropped.

        A fork that would make the session is not done.
        """
        with self._lock:
            for fork in (*self._forks, *([self._forking] if self._forking else [])):
                fork.cancelled = fork.cancelled or fork.fork.target == session
            for item in self._running:
                if item.step.session == session:
                    item.cancel("cancelled")
            return self._queue.drop(lambda item: item.step.session == session)

    def drop_link(self, link: object) -> int:
        """Forget the waiting steps and forks of a link that is gone; returns how many steps."""
        with self._lock:
            self._forks = deque(fork for fork in self._forks if fork.link is not link)
            return len(self._queue.drop(lambda item: item.link is link))

    def _main(self) -> None:
        try:
            self._load_and_run()
        finally:
            self._ended()

    def _load_and_run(self) -> None:
        try:
            executor = self._load()
        except Exception as error:  # noqa: BLE001 - handed on: `loaded` logs it and tells the peers
            self._loaded(error)
            return
        self._loaded(None)
        while items := self._take(executor):
            self._deliver(_run(executor, items))
            with self._lock:
                self._running = []

    def _take(self, executor: RunsSteps) -> list[QueuedStep]:
        """The next steps to run; an empty list when the thread is to end. Forks are done on the way."""
        while True:
            self._tokens.get()
            while fork := self._take_fork():
                _fork(executor, fork)
            with self._lock:
                self._forking = None
                if self._stopping:
                    return []
                if self._forks:
                    continue  # came this moment, and its token with it
                self._running = self._queue.take(STEPS_AT_ONCE_MAX)
                if self._running:
                    return self._running

    def _take_fork(self) -> QueuedFork | None:
        with self._lock:
            self._forking = self._forks.popleft() if self._forks else None
            return self._forking


def _fork(executor: RunsSteps, item: QueuedFork) -> None:
    try:
        executor.fork(item)
    except Exception:
        log.exception("fork.failed", session=item.fork.session)


def _run(executor: RunsSteps, items: list[QueuedStep]) -> list[Outcome]:
    try:
        return executor.run(items)
    except Exception as error:
        log.exception("executor.failed", steps=len(items))
        return [Outcome(item, failure_message(item.step, failure_of(error))) for item in items]
