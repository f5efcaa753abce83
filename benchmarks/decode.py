"""Decode tokens/s of a two-node mesh, one thread each, over transformers `generate` in one process."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.mesh_client import TASK, Prompts, ReferenceProcess, stream_chat
from tests.support.fleet import running_fleet

ROUNDS = 3
TOKENS = 96
TARGET_RATIO = 0.95


def measure(model: Path, cuts: list[str], dtype: str) -> dict[str, Any]:
    """Alternate between reference and mesh, and compare medians."""
    prompt_ids = Prompts(model).ids(TASK)
    flags = ("--dtype", dtype, "--device", "cpu", "--threads", "1")
    reference_tokens_s, mesh_tokens_s = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        ReferenceProcess(model, dtype) as reference,
        running_fleet(model, cuts, Path(folder), common_node_args=flags) as fleet,
    ):
        reference.generate(prompt_ids, 8)
        stream_chat(fleet.base_url, TASK, 8)
        for _ in range(ROUNDS):
            steps_s = reference.generate(prompt_ids, TOKENS)["steps_s"]
            reference_tokens_s.append(len(steps_s) / sum(steps_s))
            mesh_tokens_s.append(stream_chat(fleet.base_url, TASK, TOKENS).decode_tokens_s)
    ratios = [mesh / alone for mesh, alone in zip(mesh_tokens_s, reference_tokens_s, strict=True)]
    return {
        "dtype": dtype,
        "cuts": cuts,
        "reference_tokens_s": [round(value, 2) for value in reference_tokens_s],
        "mesh_tokens_s": [round(value, 2) for value in mesh_tokens_s],
        "ratio": round(statistics.median(ratios), 3),
        "target": TARGET_RATIO,
    }


def run(model: Path) -> dict[str, Any]:
    """Both dtypes that CPUs serve."""
    return {"rows": [measure(model, ["0:12", "12:24"], dtype) for dtype in ("bfloat16", "float32")]}
