"""Child processes of one command: their output, their end, and how they are stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from shared.parent_watch import PARENT_PID_VARIABLE

TAIL_LINES: Final = 20
"""How much of a dead child's output is shown."""
LINE_BYTES_MAX: Final = 1024 * 1024
STOP_TIMEOUT_S: Final = 15.0
"""Longer than a node lets open sessions go on after SIGTERM; then SIGKILL."""

_REASON: Final = "error: "

LineSink = Callable[[str, str], None]
"""Gets a child's name and one line of its output."""


class Child:
    """One running process.

    Args:
        name: For people.
        process: The process, its standard output piped and its standard error joined to it.
        on_line: Told about each line.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, on_line: LineSink) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = process
        self._on_line = on_line

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    async def follow(self) -> int:
        """Read its output until it ends, and return its exit code; negative is a signal's number."""
        output = self._process.stdout
        while output is not None and (line := await _read_line(output)) is not None:
            self.tail.append(line)
            self._on_line(self.name, line)
        return await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal unless it has ended.

        Not by `send_signal` of `subprocess`: that first asks whether the process has ended, and so may take its exit
        code away from asyncio, which then reports 255.
        """
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """SIGTERM, and SIGKILL past the deadline."""
        self.send(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self._process.wait()


class ChildFailed(Exception):
    """A child ended that nobody had told to, and is not started again.

    Args:
        name: The child's.
        code: Its exit code.
        tail: Its last lines.
        often: How often it has ended lately, where that is the reason.
    """

    def __init__(self, name: str, code: int, tail: Sequence[str], often: str = "unexpectedly") -> None:
        super().__init__(f"{name} ended {often} with {describe_exit(code)}")
        self.name = name
        self.code = code
        self.tail = list(tail)

    def reason(self) -> str | None:
        """What it has said itself of why it ended: our programs end with one line that begins with ``error:``."""
        said = [line.removeprefix(_REASON) for line in self.tail if line.startswith(_REASON)]
        return said[-1] if said else None


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


async def start_child(name: str, command: Sequence[str], env: Mapping[str, str], on_line: LineSink) -> Child:
    """Start a process in a group of its own, so that Ctrl-C reaches it through us alone, and in order."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**env, PARENT_PID_VARIABLE: str(os.getpid())},
        limit=LINE_BYTES_MAX,
        process_group=0,
    )
    return Child(name, process, on_line)


async def _read_line(output: asyncio.StreamReader) -> str | None:
    """The next line without its end; None at the end of the output."""
    try:
        line = await output.readline()
    except ValueError:  # longer than LINE_BYTES_MAX; asyncio has dropped it
        return "(a line too long to show)"
    return line.decode(errors="replace").rstrip() if line else None
