"""`GET /metrics` says in Prometheus' words what `GET /mesh` says in ours."""

from __future__ import annotations

import re

import pytest

from gateway.metrics import metrics_text
from tests.support.memory_mesh import scripted_mesh

SAMPLE = re.compile(
    r'(meshnet_[a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\})? (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)'
)


def read(text: str) -> dict[str, float]:
    """Every sample by its name and labels, the format checked: each family is announced once, before its values."""
    samples: dict[str, float] = {}
    kinds: dict[str, str] = {}
    family = ""
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            continue
        if line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ")
            assert family not in kinds, f"{family} is announced twice"
            kinds[family] = kind
            continue
        match = SAMPLE.fullmatch(line)
        assert match is not None, line
        assert match[1] == family, f"{match[1]} stands under {family}"
        assert family.endswith("_total") == (kinds[family] == "counter")
        key = f"{family.removeprefix('meshnet_')}{{{match[2] or ''}}}"
        assert key not in samples, f"{key} twice"
        samples[key] = float(match[3])
    return samples


async def test_a_mesh_that_has_worked() -> None:
    """Queue, sessions, passes and every node's state and steps are those of the snapshot."""
    async with scripted_mesh() as mesh:
        await mesh.drive(mesh.generate(3))
        await mesh.view.refresh()
        snapshot = mesh.view.snapshot()
    samples = read(metrics_text(snapshot))
    assert samples["ready{}"] == 1
    assert samples["queued{}"] == 0
    assert samples["passes_total{}"] == snapshot["gateway"]["passes"] > 0
    assert samples['generations_total{outcome="completed"}'] == 1
    for node in snapshot["nodes"]:
        assert samples[f'node_state{{node="{node["id"]}",state="ready"}}'] == 1
        assert samples[f'node_state{{node="{node["id"]}",state="unreachable"}}'] == 0
        assert samples[f'node_steps_total{{node="{node["id"]}",mode="decode"}}'] == node["steps"]["decode"]
        assert samples[f'node_kv_bytes_max{{node="{node["id"]}"}}'] == node["kv_bytes_max"]


async def test_nodes_that_nobody_has_reached() -> None:
    """Are named by their address, and what is not known of them is left out, not 0."""
    async with scripted_mesh() as mesh:
        snapshot = mesh.view.snapshot()
    node = snapshot["nodes"][0]
    lost = {**node, "id": None, "state": "unreachable", "url": 'ws://"a"\\', "kv_bytes_max": None}
    lost["link"] = {**node["link"], "round_trip_ms": None}
    samples = read(metrics_text({**snapshot, "ready": False, "nodes": [lost]}))
    name = r'node="ws://\"a\"\\"'
    assert samples["ready{}"] == 0
    assert samples[f'node_state{{{name},state="unreachable"}}'] == 1
    assert f"node_kv_bytes_max{{{name}}}" not in samples
    assert f"node_round_trip_seconds{{{name}}}" not in samples


@pytest.mark.parametrize("value", [0.1 + 0.2, 1e15, 123456789.25])
async def test_numbers_keep_their_digits(value: float) -> None:
    """Bytes of large budgets are not rounded to thousands."""
    async with scripted_mesh() as mesh:
        snapshot = mesh.view.snapshot()
    snapshot["gateway"]["journal_bytes"] = value
    assert read(metrics_text(snapshot))["journal_bytes{}"] == pytest.approx(value, rel=1e-14)
