"""A mesh over several hosts: addresses of their own, one behind a router that translates, one 20 ms away.

Hosts are network namespaces; nothing of the machine's own network is touched. Nodes join, as they must where nobody can
dial them, and one more stands in when the cable of another is out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyModels
from tests.support.fleet import ManagedProcess, child_env, wait_until
from tests.support.namespaces import Lab, available, lab, translates_addresses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not available(), reason="needs root, iproute2 and network namespaces"),
]

NETWORK = "mesh"
TOKEN, KEY = "a-mesh-token", "an-api-key"
PORT = 8000
DELAY_MS = 10.0
"""Each way: a link of 20 ms."""
ASK = """
import sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], data=sys.argv[2].encode() or None)
request.add_header("authorization", "Bearer KEY")
request.add_header("content-type", "application/json")
try:
    print(urllib.request.urlopen(request, timeout=float(sys.argv[3])).read().decode())
except urllib.error.HTTPError as error:
    print(error.read().decode())
""".replace("KEY", KEY)


@dataclass
class Hosts:
    """The mesh and a host for its callers."""

    lab: Lab
    folder: Path
    gateway: ManagedProcess
    processes: dict[str, ManagedProcess] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The gateway's."""
        return f"{self.lab.address('gateway', NETWORK)}:{PORT}"

    def start(self, name: str, host: str, command: list[str]) -> None:
        """One more process, which knows the mesh token and no key."""
        command, env = self.lab.inside(host, command), child_env(MESHNET_MESH_TOKEN=TOKEN)
        self.processes[name] = ManagedProcess(name, command, self.folder / f"{name}.log", env)

    def join(self, name: str, host: str, url: str, *flags: str) -> None:
        """A node that joins, with a cache of its own."""
        command = [sys.executable, "-m", "shard", "--join", url, "--node-id", name, "--exit-with-parent"]
        command += ["--cache-dir", str(self.folder / name), "--device", "cpu", "--threads", "1", "--dtype", "float32"]
        self.start(name, host, [*command, *flags])

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = 120.0) -> dict[str, Any]:
        """One HTTP call from the callers' host."""
        command = [sys.executable, "-c", ASK, f"http://{self.address}{path}"]
        command += [json.dumps(body) if body else "", str(timeout_s)]
        done = subprocess.run(self.lab.inside("client", command), capture_output=True, text=True, check=False)
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    def nodes(self) -> dict[str, dict[str, Any]]:
        """What GET /mesh says of each node."""
        return {node["id"]: node for node in self.ask("/mesh").get("nodes", [])}

    def held(self) -> dict[str, str]:
        """Which layers each ready node serves."""
        return {name: str(node["layers"]) for name, node in self.nodes().items() if node["state"] == "ready"}

    def passes(self) -> int:
        """Passes over the mesh so far: one for each token."""
        return int(self.ask("/mesh")["gateway"]["passes"])

    def answer(self) -> str:
        """One seeded answer."""
        body = {"model": "default", "messages": [{"role": "user", "content": "count to ten"}], "seed": 7}
        body |= {"max_completion_tokens": 120, "ignore_eos": True, "temperature": 0.8}
        reply = self.ask("/v1/chat/completions", body)
        assert "choices" in reply, f"{reply}\n{self.logs()}"
        return str(reply["choices"][0]["message"]["content"])

    def logs(self) -> str:
        """All processes' last words."""
        return "\n".join(process.tail() for process in [self.gateway, *self.processes.values()])


@contextmanager
def hosts(model: Path, folder: Path) -> Iterator[Hosts]:
    """A gateway, a node beside it, one 20 ms away, and one behind a router where the kernel can translate addresses."""
    hides = translates_addresses()
    with lab([NETWORK]) as made:
        for host in ("gateway", "client", "near", "spare", "far", "router"):
            made.add(host, [NETWORK])
        if hides:
            made.add_hidden("hidden", "router")
        command = [sys.executable, "-m", "gateway", "--model", str(model), "--exit-with-parent"]
        command += ["--host", made.address("gateway", NETWORK), "--port", str(PORT)]
        command += ["--plan-sessions", "1", "--plan-context-len", "512"]
        env = child_env(MESHNET_MESH_TOKEN=TOKEN, MESHNET_API_KEYS=KEY)
        gateway = ManagedProcess("gateway", made.inside("gateway", command), folder / "gateway.log", env)
        mesh = Hosts(made, folder, gateway)
        try:
            proxy = f"{made.address('far', NETWORK)}:9000"
            delay = [sys.executable, "-m", "tests.support.delay", proxy, mesh.address, str(DELAY_MS)]
            mesh.start("delay", "far", delay)
            third = "hidden" if hides else "router"
            fixed = ("--model", str(model), "--layers")
            mesh.join("near", "near", f"ws://{mesh.address}/mesh", *fixed, "0:2")
            mesh.join("far", "far", f"ws://{proxy}/mesh", *fixed, "2:4")
            mesh.join(third, third, f"ws://{mesh.address}/mesh", *fixed, "4:6")
            yield mesh
        finally:
            for process in [gateway, *mesh.processes.values()]:
                process.ask_to_end()
            for process in [gateway, *mesh.processes.values()]:
                process.stop()


def test_join_plan_chat_cut_heal(tiny_model: TinyModels, tmp_path: Path) -> None:
    """Three hosts serve; a fourth is planned in; a cable is out in mid-answer, and the answer is what it was."""
    with hosts(tiny_model("qwen2"), tmp_path) as mesh:
        try:
            wait_until(lambda: mesh.ask("/readyz").get("status") == "ready", "the route", 240)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {mesh.ask('/readyz')}\n{mesh.logs()}") from None
        undisturbed = mesh.answer()
        far = mesh.nodes()["far"]
        assert far["joined"]
        assert far["link"]["round_trip_ms"] >= 2 * DELAY_MS

        mesh.join("spare", "spare", f"ws://{mesh.address}/mesh", "--memory", "2G")
        wait_until(lambda: "spare" in mesh.held(), "the spare's layers", 240)
        assert mesh.answer() == undisturbed

        answers: list[str] = []
        before = mesh.passes()
        caller = threading.Thread(target=lambda: answers.append(mesh.answer()))
        caller.start()
        wait_until(lambda: mesh.passes() > before + 5, "the answer's beginning", 60)
        mesh.lab.unplug("far")
        caller.join(120)
        assert answers == [undisturbed], mesh.logs()

        mesh.lab.plug_in("far")
        wait_until(lambda: "far" in mesh.held(), "the return of the one that was cut off", 120)
        assert mesh.answer() == undisturbed
