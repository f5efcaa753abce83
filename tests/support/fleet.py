"""A fleet of real processes on loopback: one gateway and a node per layer range.

Used by end-to-end tests and benchmarks. Every process runs with `--exit-with-parent`, writes its log to
a file of its own, and is ended by pid.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.forked_nodes import ForkedNodes, ForkedProcess

REPO = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
CHAT_TIMEOUT_S = 600.0
"""A model without caches on a busy machine encodes every token of 64 answers again."""
POLL_INTERVAL_S = 0.05

forked_nodes: ForkedNodes | None = None
"""Where tests fork plain nodes from. Without it, as in benchmarks, every node is a program of its own."""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until(condition: Any, what: str, timeout_s: float = 10.0) -> Any:
    """Poll until the condition is true and return its value.

    Raises:
        TimeoutError: Naming what was waited for.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(POLL_INTERVAL_S)
    raise TimeoutError(f"{what} did not happen within {timeout_s} s")


@dataclass
class ManagedProcess:
    """A process with its log; `tail` is what a failed test should show."""

    name: str
    command: list[str]
    log: Path
    env: dict[str, str]
    process: subprocess.Popen[bytes] | ForkedProcess = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start, or start again with the same command."""
        if forked_nodes is not None and forked_nodes.may_fork(self.command, self.env):
            self.process = forked_nodes.start(self.command, self.env, self.log)
            return
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=REPO, env=self.env
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def tail(self, chars: int = 3000) -> str:
        """The end of the log."""
        return f"--- {self.name}\n{self.log.read_text(errors='replace')[-chars:]}"

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait()

    def ask_to_end(self) -> None:
        """SIGCONT, since it may be stopped, and SIGTERM."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()

    def stop(self) -> None:
        """Ask it to end, and SIGKILL it past the deadline."""
        self.ask_to_end()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()


@dataclass
class Fleet:
    """A running gateway and its nodes, in the order of their layers."""

    base_url: str
    gateway: ManagedProcess
    nodes: list[ManagedProcess]
    tls: ssl.SSLContext | bool = True

    def get(self, path: str) -> httpx.Response:
        """GET from the gateway."""
        return httpx.get(self.base_url + path, timeout=30, verify=self.tls)

    def mesh(self) -> dict[str, Any]:
        """GET /mesh."""
        return dict(self.get("/mesh").json())

    def mesh_nodes(self) -> list[dict[str, Any]]:
        """The nodes of GET /mesh, in the order of their layers."""
        return sorted(self.mesh()["nodes"], key=lambda node: node["layers"][0])

    def is_ready(self) -> bool:
        """Whether /readyz says that a full route exists."""
        with contextlib.suppress(httpx.TransportError):
            return self.get("/readyz").status_code == 200
        return False

    def chat(self, content: str, **parameters: Any) -> httpx.Response:
        """One non-streaming chat completion with a single user message."""
        body = {"model": "default", "messages": [{"role": "user", "content": content}], **parameters}
        return httpx.post(self.base_url + "/v1/chat/completions", json=body, timeout=CHAT_TIMEOUT_S)

    def logs(self) -> str:
        """All processes' last words."""
        return "\n".join(process.tail() for process in [self.gateway, *self.nodes])

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for a full route.

        Raises:
            RuntimeError: If a process ended first, with the logs.
            TimeoutError: If it took too long.
        """

        def ready_or_dead() -> bool:
            for process in [self.gateway, *self.nodes]:
                if process.process.poll() is not None:
                    raise RuntimeError(f"{process.name} ended with {process.process.returncode}\n{self.logs()}")
            return self.is_ready()

        try:
            wait_until(ready_or_dead, "the route", timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.logs()}") from None


def child_env(**extra: str) -> dict[str, str]:
    """The environment of a child: ours without `MESHNET_…`, one thread, no hub."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("MESHNET_")}
    return {**env, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **extra}


@contextlib.contextmanager
def running_fleet(
    model: Path,
    cuts: Sequence[str],
    folder: Path,
    *,
    node_args: dict[int, list[str]] | None = None,
    common_node_args: Sequence[str] = ("--dtype", "float32", "--device", "cpu", "--threads", "1"),
    gateway_args: Sequence[str] = (),
    node_urls: dict[int, str] | None = None,
    node_ports: Sequence[int] | None = None,
    ca: Path | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Fleet]:
    """Start a fleet, wait for its route, and end it.

    Args:
        model: A model folder.
        cuts: Layer ranges such as ``["0:3", "3:6"]``, one node each.
        folder: Where logs go.
        node_args: Further flags by node index.
        common_node_args: Flags of every node.
        gateway_args: Further flags of the gateway.
        node_urls: Where the gateway dials a node, when not the node itself (a proxy between them).
        node_ports: Where the nodes listen, when the caller must know before.
        ca: Who has signed the gateway's certificate, when `gateway_args` give it one.
        start_timeout_s: How long the route may take.
    """
    ports = node_ports or [free_port() for _ in cuts]
    port = free_port()
    nodes: list[ManagedProcess] = []
    gateway = None
    try:
        for index, layers in enumerate(cuts):
            command = [sys.executable, "-m", "shard", "--model", str(model), "--layers", layers]
            command += ["--listen", f"127.0.0.1:{ports[index]}", "--node-id", f"node-{index}", "--exit-with-parent"]
            command += [*common_node_args, *(node_args or {}).get(index, [])]
            nodes.append(ManagedProcess(f"node-{index}", command, folder / f"node-{index}.log", child_env()))
        command = [sys.executable, "-m", "gateway", "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--exit-with-parent"]
        for index, node_port in enumerate(ports):
            command += ["--node", (node_urls or {}).get(index, f"ws://127.0.0.1:{node_port}")]
        gateway = ManagedProcess("gateway", [*command, *gateway_args], folder / "gateway.log", child_env())
        tls = ssl.create_default_context(cafile=ca) if ca else True
        fleet = Fleet(f"http{'s' if ca else ''}://127.0.0.1:{port}", gateway, nodes, tls)
        fleet.wait_ready(start_timeout_s)
        yield fleet
    finally:
        processes = [*([gateway] if gateway else []), *nodes]
        for process in processes:
            process.ask_to_end()
        for process in processes:
            process.stop()
