"""The thread on which grammars are compiled and followed; one that does not come back is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

import structlog

from shared.errors import StepFailed

ABANDONED_MAX = 2
"""Threads that may be left behind at work, each taking a core; with more, grammars are refused until one is done."""

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.stdlib.get_logger(__name__)


class GrammarWorker:
    """Runs calls one after the other, in order. Its threads never keep the process from ending.

    The library's work cannot be interrupted, so `abandon` leaves a thread to its call and goes on with a new one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: SimpleQueue[Callable[[], None] | None] | None = None
        self._abandoned = 0

    @property
    def abandoned(self) -> int:
        """Threads that were left behind and are still at work."""
        return self._abandoned

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call on the thread.

        Raises:
            StepFailed: `bad_grammar`: too many threads that were left behind are still at work.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._abandoned > ABANDONED_MAX:
                raise StepFailed("bad_grammar", "the node is still busy with grammars that take too long")
            if self._calls is None:
                self._calls = SimpleQueue()
                threading.Thread(target=self._serve, args=(self._calls,), name="grammar", daemon=True).start()
            self._calls.put(lambda: _run(future, function, *args, **kwargs))
        return future

    def abandon(self) -> None:
        """The call under way takes too long: what waits behind it is run by a new thread."""
        with self._lock:
            calls, self._calls = self._calls, None
            if calls is None:
                return
            self._abandoned += 1
            waiting = _drained(calls)
            calls.put(None)
            if waiting:
                self._calls = SimpleQueue()
                for call in waiting:
                    self._calls.put(call)
                threading.Thread(target=self._serve, args=(self._calls,), name="grammar", daemon=True).start()
        log.warning("grammar.abandoned", threads=self._abandoned)

    def _serve(self, calls: SimpleQueue[Callable[[], None] | None]) -> None:
        while (call := calls.get()) is not None:
            call()
        with self._lock:
            self._abandoned -= 1


def _run(future: Future[T], function: Callable[..., T], *args: Any, **kwargs: Any) -> None:
    try:
        future.set_result(function(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the result
        future.set_exception(error)


def _drained(calls: SimpleQueue[Callable[[], None] | None]) -> list[Callable[[], None]]:
    waiting = []
    while not calls.empty():
        call = calls.get()
        if call is not None:
            waiting.append(call)
    return waiting
