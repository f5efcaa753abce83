"""What `compose.yaml` says, run without an engine: its commands, environments, user, networks and health checks.

Each service is a process in a network namespace on the networks that the file gives it. Paths that only a container has
(`/models`, `/run/secrets`) are replaced by folders of the test, and `meshnet` by this interpreter; nothing else is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyModels
from tests.support.deployment import flags_of, interpreted_compose
from tests.support.fleet import REPO, ManagedProcess, wait_until
from tests.support.namespaces import UID, Lab, available, lab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif("--join" not in flags_of("shard"), reason="nodes of this version cannot join"),
    pytest.mark.skipif(not available(), reason="needs root and network namespaces"),
]

NODES = 3
"""`--scale shard-cpu=3`."""
API_KEY, MESH_TOKEN = "compose-key-1", "compose-token-1"
START_TIMEOUT_S = 200.0


@dataclass
class Composed:
    """The services as they run.

    Args:
        lab: Their networks.
        folder: What stands for the containers' own paths.
        file: The compose file, interpreted.
    """

    lab: Lab
    folder: Path
    file: dict[str, Any]
    processes: dict[str, ManagedProcess] = field(default_factory=dict)

    def add(self, host: str, service: str) -> None:
        """Give a service its place on its networks."""
        self.lab.add(host, sorted(self.file["services"][service]["networks"]))

    def start(self, host: str, service: str) -> None:
        """Start it as its image would."""
        described = self.file["services"][service]
        command = [sys.executable, "-m", "shared.cli", *described["command"]]
        whole = self.lab.command(host, command, self._environment(described))
        self.processes[host] = ManagedProcess(host, whole, self.folder / f"{host}.log", dict(os.environ))

    def is_healthy(self, host: str, service: str) -> bool:
        """What the service's own check says."""
        described = self.file["services"][service]
        kind, python, *rest = described["healthcheck"]["test"]
        assert (kind, python) == ("CMD", "python")
        whole = self.lab.command(host, [sys.executable, *rest], self._environment(described))
        return subprocess.run(whole, check=False, capture_output=True, timeout=30).returncode == 0

    def curl(self, host: str, url: str, body: object = None) -> subprocess.CompletedProcess[str]:
        """Call from a host, with the API key; 10 s to connect."""
        command = [
            "curl",
            "-sS",
            "--connect-timeout",
            "3",
            "--max-time",
            "90",
            "-H",
            f"authorization: Bearer {API_KEY}",
        ]
        if body is not None:
            command += ["-H", "content-type: application/json", "-d", json.dumps(body)]
        whole = self.lab.command(host, [*command, url], {"PATH": os.environ["PATH"]})
        return subprocess.run(whole, check=False, capture_output=True, text=True, timeout=120)

    def logs(self) -> str:
        """Everybody's last words."""
        return "\n".join(process.tail() for process in self.processes.values())

    def stop(self) -> None:
        """SIGTERM to all, as `docker compose down`; what is left is killed."""
        for process in self.processes.values():
            process.ask_to_end()
        for process in self.processes.values():
            process.stop()

    def _environment(self, described: dict[str, Any]) -> dict[str, str]:
        places = {"/run/secrets": str(self.folder / "secrets"), "/models": str(self.folder / "models")}
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder / "tmp"), "TMPDIR": str(self.folder / "tmp")}
        environment |= {"PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # of the test, not of the file
        for name, value in described["environment"].items():
            for there, here in places.items():
                value = str(value).replace(there, here)  # noqa: PLW2901 - the same value with other paths
            environment[name] = value
        return environment


@pytest.fixture(scope="module")
def composed(tiny_model: TinyModels) -> Iterator[Composed]:
    """The gateway, three nodes and a client that is in their clients' network alone; started, not waited for."""
    folder = Path(tempfile.mkdtemp(prefix="meshnet-compose-"))
    folder.chmod(0o755)
    try:
        model = folder / "the-model"
        shutil.copytree(tiny_model("qwen2"), model)
        for name in ("models", "tmp", "secrets"):
            (folder / name).mkdir()
        for name in ("models", "tmp"):
            os.chown(folder / name, UID, UID)
        (folder / "secrets" / "mesh_token").write_text(f"{MESH_TOKEN}\n")
        (folder / "secrets" / "api_keys").write_text(f"{API_KEY}\n")
        file = interpreted_compose(folder, MESHNET_MODEL=str(model))
        with lab(list(file["networks"])) as networks:
            services = Composed(networks, folder, file)
            services.add("gateway", "gateway")
            for number in range(NODES):
                services.add(f"shard-{number}", "shard-cpu")
            networks.add("client", ["clients"])
            networks.write_hosts()
            try:
                services.start("gateway", "gateway")
                wait_until(lambda: services.is_healthy("gateway", "gateway"), "a healthy gateway", START_TIMEOUT_S)
                for number in range(NODES):
                    services.start(f"shard-{number}", "shard-cpu")
                yield services
            finally:
                services.stop()
    finally:
        shutil.rmtree(folder)


def wait_served(composed: Composed) -> None:
    """Wait until there is a route, or a process has ended."""

    def served() -> bool:
        for process in composed.processes.values():
            assert process.process.poll() is None, composed.logs()
        return '"ready"' in composed.curl("client", "http://gateway:8000/readyz").stdout

    with contextlib.suppress(TimeoutError):
        wait_until(served, "a route", START_TIMEOUT_S)
        return
    pytest.fail(f"no route within {START_TIMEOUT_S} s\n{composed.logs()}")


def test_it_serves_is_healthy_and_ends_when_told(composed: Composed):
    """A chat completion comes through the gateway; nodes are out of a client's reach; SIGTERM ends all with 0."""
    wait_served(composed)
    body = {"model": "default", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
    answer = composed.curl("client", "http://gateway:8000/v1/chat/completions", body)
    assert json.loads(answer.stdout)["usage"]["completion_tokens"] > 0, answer.stdout + composed.logs()
    metrics = composed.curl("client", "http://gateway:8000/metrics").stdout
    assert "meshnet_ready 1\n" in metrics
    node = composed.lab.address("shard-0", "mesh")
    assert "Could not resolve host" in composed.curl("client", "http://shard-0:9001/healthz").stderr
    assert composed.curl("client", f"http://{node}:9001/healthz").returncode != 0
    assert composed.curl("shard-1", f"http://{node}:9001/healthz").returncode == 7  # it listens for itself alone
    for number in range(NODES):
        node = f"shard-{number}"  # a spare may still be starting: an engine would ask again as well
        wait_until(lambda node=node: composed.is_healthy(node, "shard-cpu"), f"the health of {node}", 120)
    for process in composed.processes.values():
        process.ask_to_end()
    ends = {host: process.process.wait(60) for host, process in composed.processes.items()}
    assert set(ends.values()) == {0}, f"{ends}\n{composed.logs()}"
    for secret in (API_KEY, MESH_TOKEN):
        assert not any(secret in process.log.read_text() for process in composed.processes.values())
