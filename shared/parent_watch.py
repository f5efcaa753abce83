"""Ends this process when the one that started it is gone, however it went: `--exit-with-parent`.

A thread compares the parent's id twice a second, which works everywhere and also while the main thread
is busy importing or loading. On Linux the kernel also sends a signal at the parent's death. It sends it
when the *thread* that started us ends, so the signal is one that is ignored by default, and only makes us look.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

POLL_INTERVAL_S = 0.5
"""How often the parent's id is looked at."""
LEAVE_TIMEOUT_S = 5.0
"""How long an orderly end may take once the parent is gone."""
EXIT_CODE = 1
PARENT_PID_VARIABLE = "MESHNET_PARENT_PID"
"""Set by a parent for its child, so that a parent that dies before the child first looks is missed too."""
_PR_SET_PDEATHSIG = 1


class ParentWatch:
    """Looks whether the parent is still the one that started us.

    Args:
        parent: Its process id, taken as early as possible.
        read_parent: Gives the present parent's process id.
        gone: Called once, on whichever thread notices.
    """

    def __init__(self, *, parent: int, gone: Callable[[], None], read_parent: Callable[[], int] = os.getppid) -> None:
        self._parent = parent
        self._read_parent = read_parent
        self._gone = gone
        self._lock = threading.Lock()
        self._done = False

    def check(self) -> bool:
        """Whether the parent is gone; the first time it is, `gone` is called."""
        if self._read_parent() == self._parent:
            return False
        with self._lock:
            first, self._done = not self._done, True
        if first:
            self._gone()
        return True

    def run(self) -> None:
        """Check until the parent is gone."""
        while not self.check():
            time.sleep(POLL_INTERVAL_S)


def exit_with_parent() -> None:
    """Start watching; call it from the main thread, first of all.

    Once the parent is gone this process gets a SIGTERM from itself, and is ended `LEAVE_TIMEOUT_S` later if it
    has not ended by then.
    """
    parent = int(os.environ.pop(PARENT_PID_VARIABLE, os.getppid()))  # popped: it is not for our own children
    watch = ParentWatch(parent=parent, gone=_leave)
    if sys.platform == "linux":
        signal.signal(signal.SIGURG, lambda *_: watch.check())
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGURG), 0, 0, 0)
    threading.Thread(target=watch.run, name="parent-watch", daemon=True).start()


def _leave() -> None:
    timer = threading.Timer(LEAVE_TIMEOUT_S, os._exit, args=(EXIT_CODE,))
    timer.daemon = True
    timer.start()
    os.kill(os.getpid(), signal.SIGTERM)
