"""Peak resident memory of a node, loading and serving, against the bytes of its range."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.mesh_client import Prompts, stream_chat
from shard.device import DTYPES
from shard.loader import plan_range
from shared.layers import LayerRange
from tests.support.fleet import running_fleet

ALLOWED_FACTOR = 1.15
ALLOWED_EXTRA_BYTES = 450_000_000
CUTS = {2: ["0:12", "12:24"], 3: ["0:8", "8:16", "16:24"]}


def peak_rss_bytes(pid: int) -> int:
    """The kernel's high-water mark of a process's resident set."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no VmHWM")


def measure(model: Path, cuts: list[str], dtype: str) -> list[dict[str, Any]]:
    """One row per node, after a prompt of 1,000 tokens and some decoding."""
    flags = ("--dtype", dtype, "--device", "cpu", "--threads", "1")
    with (
        tempfile.TemporaryDirectory() as folder,
        running_fleet(model, cuts, Path(folder), common_node_args=flags) as fleet,
    ):
        stream_chat(fleet.base_url, Prompts(model).of_length(1000), 16)
        rows = []
        for node, cut in zip(fleet.nodes, cuts, strict=True):
            weights = plan_range(model, LayerRange.parse(cut)).weight_bytes(DTYPES[dtype])
            allowed = ALLOWED_FACTOR * weights + ALLOWED_EXTRA_BYTES
            peak = peak_rss_bytes(node.pid)
            rows.append(
                {
                    "layers": cut,
                    "dtype": dtype,
                    "weights_mb": round(weights / 1e6),
                    "peak_rss_mb": round(peak / 1e6),
                    "allowed_mb": round(allowed / 1e6),
                    "within": peak <= allowed,
                }
            )
        return rows


def run(model: Path) -> dict[str, Any]:
    """Both cuts, both dtypes."""
    return {
        "rows": [
            row for dtype in ("bfloat16", "float32") for cuts in CUTS.values() for row in measure(model, cuts, dtype)
        ]
    }
