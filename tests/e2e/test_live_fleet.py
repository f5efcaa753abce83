"""Real nodes join a real gateway: they are given layers, one is killed, one is drained, and streams go on."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.models.measure import measure_model
from shared.models.range_memory import slot_bytes
from tests.conftest import TinyModels
from tests.support.fleet import REPO, Fleet, ManagedProcess, child_env, free_port, wait_until

TOKEN = "a-mesh-token"
QUESTION = "count to ten"
SEEDED = {"temperature": 0.8, "seed": 7, "max_completion_tokens": 200, "ignore_eos": True}


def start_node(
    model: Path, url: str, folder: Path, name: str, *, memory: str = "1G", program: tuple[str, ...] = ("shard",)
) -> ManagedProcess:
    """A node that joins, with a cache of its own."""
    command = [sys.executable, "-m", *program, "--model", str(model), "--join", url.replace("http:", "ws:") + "/mesh"]
    command += ["--node-id", name, "--cache-dir", str(folder / name), "--device", "cpu", "--threads", "1"]
    command += ["--dtype", "float32", "--memory", memory, "--exit-with-parent"]
    return ManagedProcess(name, command, folder / f"{name}.log", child_env(MESHNET_MESH_TOKEN=TOKEN))


@contextmanager
def live_fleet(
    model: Path,
    folder: Path,
    names: tuple[str, ...],
    *,
    gateway_args: tuple[str, ...] = (),
    programs: dict[str, tuple[str, ...]] | None = None,
) -> Iterator[Fleet]:
    """A gateway that dials nobody, and nodes that dial it; some of them are other programs than a plain node."""
    started_as = programs or {}
    port = free_port()
    command = [sys.executable, "-m", "gateway", "--model", str(model), "--port", str(port), "--exit-with-parent"]
    command += ["--plan-sessions", "2", "--plan-context-len", "512", *gateway_args]
    gateway = ManagedProcess("gateway", command, folder / "gateway.log", child_env(MESHNET_MESH_TOKEN=TOKEN))
    fleet = Fleet(f"http://127.0.0.1:{port}", gateway, [])
    try:
        for name in names:
            program = started_as.get(name, ("shard",))
            fleet.nodes.append(start_node(model, fleet.base_url, folder, name, program=program))
        fleet.wait_ready(240)
        yield fleet
    finally:
        for process in [gateway, *fleet.nodes]:
            process.ask_to_end()
        for process in [gateway, *fleet.nodes]:
            process.stop()


def meshnet(fleet: Fleet, *arguments: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """Run a command against the fleet's gateway."""
    command = [sys.executable, "-m", "shared.cli", *arguments, "--gateway", fleet.base_url]
    env = child_env(MESHNET_MESH_TOKEN=token)
    return subprocess.run(command, cwd=REPO, env=env, text=True, capture_output=True, timeout=120, check=False)


def holders(fleet: Fleet) -> dict[str, str]:
    """Who serves which layers."""
    return {node["id"]: str(node["layers"]) for node in fleet.mesh()["nodes"] if node["state"] == "ready"}


class Answer(threading.Thread):
    """One answer, read in the background."""

    def __init__(self, fleet: Fleet, **parameters: int) -> None:
        super().__init__(daemon=True)
        self._parameters = {**SEEDED, **parameters}
        self.text = ""
        self.status = 0
        self._fleet = fleet
        self.start()

    def run(self) -> None:
        """Ask."""
        response = self._fleet.chat(QUESTION, **self._parameters)
        self.status = response.status_code
        self.text = response.json()["choices"][0]["message"]["content"] if self.status == 200 else response.text

    def wait(self) -> str:
        """Its text."""
        self.join(120)
        assert self.status == 200, f"{self.status}: {self.text}\n{self._fleet.logs()}"
        return self.text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_life_of_a_live_fleet(tiny_model: TinyModels, tmp_path: Path) -> None:
    """Planned, killed and started anew, drained under a stream: the text stays what it was."""
    with live_fleet(tiny_model("qwen2"), tmp_path, ("a", "b")) as fleet:
        undisturbed = Answer(fleet).wait()
        plan = fleet.mesh()["plan"]
        assert plan["reason"] == "the first plan"
        assert plan["predicted_tokens_per_s"] > 0
        wait_until(lambda: len(holders(fleet)) == 2, "the replica", 60)

        shown = meshnet(fleet, "plan")
        assert shown.returncode == 0, shown.stderr
        assert "tokens/s observed in the last minute" in shown.stdout
        assert "the first plan" in shown.stdout or "stands in for" in shown.stdout

        answer = Answer(fleet)
        wait_until(lambda: fleet.mesh()["gateway"]["passes"] > 220, "the answer's beginning", 60)
        busy = max(fleet.mesh()["nodes"], key=lambda node: node["sessions"])["id"]
        process = next(node for node in fleet.nodes if node.name == busy)
        process.kill()
        process.start()
        assert answer.wait() == undisturbed
        wait_until(lambda: len(holders(fleet)) == 2, "its return", 60)

        answer = Answer(fleet)
        before = fleet.mesh()["gateway"]["passes"]
        wait_until(lambda: fleet.mesh()["gateway"]["passes"] > before + 20, "the answer's beginning", 60)
        busy = max(fleet.mesh()["nodes"], key=lambda node: node["sessions"])["id"]
        refused = meshnet(fleet, "drain", busy, token="wrong")
        assert refused.returncode == 1
        assert "API key" in refused.stderr
        drained = meshnet(fleet, "drain", busy)
        assert drained.returncode == 0, drained.stderr + fleet.logs()
        assert "all its sessions have moved; it has ended" in drained.stdout
        assert answer.wait() == undisturbed
        process = next(node for node in fleet.nodes if node.name == busy)
        wait_until(lambda: process.process.poll() is not None, "the drained node's end", 30)
        assert process.process.returncode == 0
        assert busy not in holders(fleet)
        unknown = meshnet(fleet, "drain", "nobody")
        assert unknown.returncode == 1
        assert "no node called nobody" in unknown.stderr
        fleet.gateway.ask_to_end()
        assert fleet.gateway.process.wait(20) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_predicted_is_what_is_observed(tiny_model: TinyModels, tmp_path: Path) -> None:
    """Within 20 %, on two nodes of which each is far slower than it has measured: some tokens put the plan right."""
    slow = {name: ("tests.support.slow_shard", layer) for name, layer in (("a", "15ms"), ("b", "25ms"))}
    model = tiny_model("qwen2")
    slot = slot_bytes(measure_model(model, "float32").layers[0].slot, 512)
    sessions = (1 << 30) * 3 // 2 // (6 * slot)  # of which each node's memory takes two thirds
    flags = ("--plan-sessions", str(sessions))
    with live_fleet(model, tmp_path, ("a", "b"), gateway_args=flags, programs=slow) as fleet:
        before = fleet.mesh()["plan"]
        assert len(before["stages"]) == 2
        nodes = fleet.mesh()["nodes"]
        assert all(node["link"]["bandwidth_mbit"] > 10 for node in nodes)
        Answer(fleet, max_completion_tokens=60).wait()
        plan = fleet.mesh()["plan"]
        assert [stage["nodes"][0]["layer_ms_from"] for stage in plan["stages"]] == ["steps", "steps"], fleet.logs()
        assert plan["predicted_tokens_per_s"] == pytest.approx(plan["observed_tokens_per_s"], rel=0.2), plan
        assert before["predicted_tokens_per_s"] > 2 * plan["observed_tokens_per_s"], "the slow-down was to be found out"
