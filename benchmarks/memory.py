"""Peak resident memory of a node, loading and serving, against what planner and node say that it takes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.mesh_client import Prompts, stream_chat
from shared.layers import LayerRange
from shared.models.facts import ModelFacts
from shared.models.measure import measure_model
from shared.models.range_memory import RUNTIME_BYTES, StepSizes, range_memory, slot_bytes, weights_bytes
from tests.support.fleet import running_fleet

ALLOWED_ERROR = 0.10
PROMPT_TOKENS, ANSWER_TOKENS = 1000, 16
CUTS = {1: ["0:24"], 2: ["0:12", "12:24"], 3: ["0:8", "8:16", "16:24"]}


def peak_rss_bytes(pid: int) -> int:
    """The kernel's high-water mark of a process's resident set."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no VmHWM")


def predicted_bytes(model: ModelFacts, layers: LayerRange) -> int:
    """What a node's process should take at most, serving one such call."""
    length = PROMPT_TOKENS + ANSWER_TOKENS
    need = range_memory(model, layers, StepSizes(context_len=length))
    session = sum(slot_bytes(layer.slot, length) for layer in model.layers[layers.start : layers.end])
    return RUNTIME_BYTES + need.weights_bytes + need.working_bytes + session


def measure(model: Path, cuts: list[str], dtype: str) -> list[dict[str, Any]]:
    """One row per node, after a long prompt and some decoding."""
    flags = ("--dtype", dtype, "--device", "cpu", "--threads", "1")
    facts = measure_model(model, dtype)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_fleet(model, cuts, Path(folder), common_node_args=flags) as fleet,
    ):
        stream_chat(fleet.base_url, Prompts(model).of_length(PROMPT_TOKENS), ANSWER_TOKENS)
        return [
            row(facts, LayerRange.parse(cut), dtype, peak_rss_bytes(node.pid))
            for node, cut in zip(fleet.nodes, cuts, strict=True)
        ]


def row(facts: ModelFacts, layers: LayerRange, dtype: str, peak: int) -> dict[str, Any]:
    """One node's figures."""
    predicted = predicted_bytes(facts, layers)
    return {
        "layers": str(layers),
        "dtype": dtype,
        "weights_mb": round(weights_bytes(facts, layers) / 1e6),
        "peak_rss_mb": round(peak / 1e6),
        "predicted_mb": round(predicted / 1e6),
        "error": round(predicted / peak - 1, 3),
        "within": abs(predicted / peak - 1) <= ALLOWED_ERROR,
    }


def run(model: Path) -> dict[str, Any]:
    """All cuts, both dtypes."""
    return {
        "rows": [
            row for dtype in ("bfloat16", "float32") for cuts in CUTS.values() for row in measure(model, cuts, dtype)
        ]
    }
