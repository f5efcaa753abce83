"""kill -9 of a gateway in mid-stream: the nodes stay, find the one that takes its place, and forget the dead one's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import TinyModels
from tests.support.fleet import Fleet, ManagedProcess, child_env, free_port, wait_until

QUESTION = "count to ten"
SEEDED = {"temperature": 0.8, "seed": 7, "max_completion_tokens": 120, "ignore_eos": True}
KV_TTL_S = 4
BACK_WITHIN_S = 60.0
"""Redialled within 2 s, or joined within 5 s; and the range is planned and loaded again if need be."""


@contextmanager
def mixed_fleet(model: Path, folder: Path) -> Iterator[Fleet]:
    """A gateway, a node of three layers that it dials, and one that dials it and is given the others."""
    node_port, port = free_port(), free_port()
    common = ["--model", str(model), "--exit-with-parent"]
    computing = ["--dtype", "float32", "--device", "cpu", "--threads", "1", "--kv-ttl-seconds", str(KV_TTL_S)]
    shard = [sys.executable, "-m", "shard", *common, *computing]
    dialled = [*shard, "--layers", "0:3", "--listen", f"127.0.0.1:{node_port}", "--node-id", "dialled"]
    joined = [*shard, "--join", f"ws://127.0.0.1:{port}", "--node-id", "joined", "--memory", "1G"]
    joined += ["--cache-dir", str(folder / "cache")]
    gateway = [sys.executable, "-m", "gateway", *common, "--port", str(port)]
    gateway += ["--node", f"ws://127.0.0.1:{node_port}", "--plan-sessions", "2", "--plan-context-len", "512"]
    commands = {"gateway": gateway, "dialled": dialled, "joined": joined}
    processes: list[ManagedProcess] = []
    try:
        for name, command in commands.items():
            processes.append(ManagedProcess(name, command, folder / f"{name}.log", child_env()))
        fleet = Fleet(f"http://127.0.0.1:{port}", processes[0], processes[1:])
        fleet.wait_ready(240)
        yield fleet
    finally:
        for process in processes:
            process.ask_to_end()
        for process in processes:
            process.stop()


def kill_in_mid_stream(fleet: Fleet, after_chunks: int) -> None:
    """Begin an answer, and kill the gateway while it is read."""
    body: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": QUESTION}], **SEEDED}
    with httpx.stream("POST", f"{fleet.base_url}/v1/chat/completions", json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()
        for _ in range(after_chunks):
            next(lines)
        fleet.gateway.kill()
        with pytest.raises(httpx.TransportError):
            for _ in lines:
                pass


def sessions(fleet: Fleet) -> dict[str, int]:
    """How many each node holds."""
    return {node["id"]: node["sessions"] for node in fleet.mesh()["nodes"]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_gateway_is_replaced(tiny_model: TinyModels, tmp_path: Path) -> None:
    """Both nodes come back by themselves, as the same processes; the text is what it was; no session is left behind."""
    with mixed_fleet(tiny_model("qwen2"), tmp_path) as fleet:
        undisturbed = fleet.chat(QUESTION, **SEEDED)
        assert undisturbed.status_code == httpx.codes.OK, fleet.logs()
        pids = {node["id"]: node["pid"] for node in fleet.mesh()["nodes"]}
        kill_in_mid_stream(fleet, after_chunks=20)

        fleet.gateway.start()
        fleet.wait_ready(BACK_WITHIN_S)
        assert {node["id"]: node["pid"] for node in fleet.mesh()["nodes"]} == pids
        again = fleet.chat(QUESTION, **SEEDED)
        assert again.status_code == httpx.codes.OK, fleet.logs()
        assert again.json()["choices"] == undisturbed.json()["choices"]
        wait_until(lambda: not any(sessions(fleet).values()), "the dead gateway's sessions' end", 3 * KV_TTL_S)
        assert sum(node["evictions"].get("expired", 0) for node in fleet.mesh()["nodes"]) >= 1, fleet.logs()
