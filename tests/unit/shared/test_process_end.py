"""A process ends at once, and loses nothing that it has printed."""

from __future__ import annotations

import subprocess
import sys

SLOW_TO_TEAR_DOWN = """
import atexit, sys, time
from shared.process_end import end_process
atexit.register(time.sleep, 60)
print("said")
print("warned", file=sys.stderr)
end_process(3)
"""


def test_nothing_is_taken_apart_and_nothing_is_lost():
    """What would happen at an interpreter's end does not."""
    done = subprocess.run(
        [sys.executable, "-c", SLOW_TO_TEAR_DOWN], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "said\n", "warned\n")
