"""`python -m gateway` as a process: what it prints, how it serves without nodes, how it ends."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.fleet import ManagedProcess, child_env, free_port, wait_until
from tests.support.text_tokenizers import build_byte_level

START_TIMEOUT_S = 60.0


@dataclass
class RunningGateway:
    """A gateway whose only node does not exist."""

    process: ManagedProcess
    url: str
    node_url: str


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    """A gateway on a port that the kernel chose, configured by flags and variables."""
    model = build_byte_level(tmp_path / "tiny")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    node_url = f"ws://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "gateway", "--model", str(model), "--port", "0", "--exit-with-parent"]
    env = child_env(MESHNET_NODES=node_url, MESHNET_API_KEYS="one,two", MESHNET_ROUTE_WAIT_SECONDS="0.2")
    process = ManagedProcess("gateway", command, tmp_path / "gateway.log", env)
    try:
        said = wait_until(lambda: re.search(r"listening on (\S+)\n", process.tail()), "the address", START_TIMEOUT_S)
        yield RunningGateway(process, said[1], node_url)
    finally:
        process.stop()


def test_a_gateway_without_nodes_serves_says_so_and_ends_when_told(gateway: RunningGateway):
    """Alive, not ready, 503 with `retry-after`, the node's state in /mesh, JSON logs, exit code 0."""
    keyed = httpx.Client(base_url=gateway.url, headers={"authorization": "Bearer two"}, timeout=10)
    with keyed:
        assert httpx.get(f"{gateway.url}/v1/models").status_code == 401
        assert keyed.get("/healthz").status_code == 200
        assert keyed.get("/readyz").json()["error"]["code"] == "not_ready"
        assert keyed.get("/v1/models").json()["data"][0]["id"] == "tiny"
        body = {"model": "default", "messages": [{"role": "user", "content": "classified"}], "stream": True}
        refused = keyed.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert refused.headers["retry-after"]
        (node,) = keyed.get("/mesh").json()["nodes"]
        assert (node["url"], node["state"]) == (gateway.node_url, "unreachable")
    gateway.process.process.send_signal(signal.SIGTERM)
    assert gateway.process.process.wait(10) == 0
    log = gateway.process.log.read_text()
    assert "classified" not in log
    assert "Traceback" not in log
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    (call,) = [event for event in events if event.get("path") == "/v1/chat/completions"]
    assert (call["event"], call["status"], call["error"]) == ("request.finished", 503, "not_ready")
