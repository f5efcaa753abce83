"""Nodes that are forked from a process which has torch and transformers imported: each would import for six seconds.

What runs is `python -m shard` from its `main` on, with its arguments, its variables, its log, and a process of its own.
What is looked at from outside (its variables in /proc, its command line) is the forking process's.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TextIO

REPO = Path(__file__).resolve().parents[2]
IMPORTED = (
    "shard.__main__",
    "shard.load",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
)
"""All that a node of the usual models imports."""
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0


@dataclass
class ForkedProcess:
    """As much of `subprocess.Popen` as tests use, for the child of another process of ours."""

    pid: int
    returncode: int | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def poll(self) -> int | None:
        """The exit status, or None while it runs; negative is a signal's number."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It did not end in time.
        """
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(["shard", str(self.pid)], timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it, unless the process has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def ended(self, returncode: int) -> None:
        """It has ended."""
        self.returncode = returncode
        self._ended.set()


class ForkedNodes:
    """The forking process, which is started for the first node and ends with this one, and what it has forked.

    Args:
        env: Its variables. A node's own must be the same but for `MESHNET_…` and `PYTEST_…`: libraries read theirs when
            they are imported.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self._env = _without_settings(env)
        self._server: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
        self._lock = threading.Lock()
        self._forked: SimpleQueue[ForkedProcess] = SimpleQueue()

    def may_fork(self, command: list[str], env: dict[str, str]) -> bool:
        """Whether this is a plain node in the same surroundings."""
        return command[:3] == [sys.executable, "-m", "shard"] and _without_settings(env) == self._env

    def start(self, command: list[str], env: dict[str, str], log: Path) -> ForkedProcess:
        """Fork a node; what it prints is appended to the log."""
        log.touch()  # as a program of its own finds it
        settings = {name: value for name, value in env.items() if name not in self._env}
        request = {"arguments": command[3:], "settings": settings, "log": str(log)}
        with self._lock:
            stdin = (self._server or self._start_server()).stdin
            assert stdin is not None
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            return self._forked.get(timeout=START_TIMEOUT_S)

    def close(self) -> None:
        """End the forking process."""
        if self._server is not None and self._listener is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.wait(END_TIMEOUT_S)
            self._listener.join(END_TIMEOUT_S)

    def _start_server(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.support.forked_nodes"]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPO, env=self._env, text=True
        )
        self._listener = threading.Thread(target=self._listen, args=(self._server.stdout,), daemon=True)
        self._listener.start()
        return self._server

    def _listen(self, said: TextIO) -> None:
        running: dict[int, ForkedProcess] = {}
        with said:
            for line in said:
                pid, status = json.loads(line)
                if status is None:
                    running[pid] = ForkedProcess(pid)
                    self._forked.put(running[pid])
                else:
                    running.pop(pid).ended(os.waitstatus_to_exitcode(status))


def _without_settings(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(("MESHNET_", "PYTEST_"))}


def _serve() -> None:
    """Fork a node for every line of standard input, until it ends, and say on standard output what became of them."""
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([sys.stdin.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap()
        if sys.stdin.fileno() in ready:
            line = _read_line()
            if not line:
                return
            _fork(json.loads(line), (woken, wake))


def _read_line() -> bytes:
    """A line of standard input, and nothing of the next: what were buffered, `select` would not see."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            break
        line += byte
    return line


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say(pid, status)


def _say(pid: int, status: int | None) -> None:
    sys.stdout.write(json.dumps([pid, status]) + "\n")
    sys.stdout.flush()


def _fork(request: dict[str, object], ours: tuple[int, int]) -> None:
    pid = os.fork()
    if pid:
        _say(pid, None)
        return
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor in ours:
        os.close(descriptor)
    log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    os.environ.update(request["settings"])  # type: ignore[call-overload]
    sys.argv = ["shard", *request["arguments"]]  # type: ignore[misc]
    from shard.__main__ import main
    from shared.process_end import end_process

    end_process(main())


if __name__ == "__main__":
    _serve()
