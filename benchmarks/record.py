"""Where results go: one JSON file per run, naming commit, machine and libraries."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def commit() -> str:
    """The commit measured, marked when the tree differs from it."""
    run = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(run, capture_output=True, text=True, check=True, cwd=RESULTS.parent).stdout.strip()


def processor() -> str:
    """The processor's name, as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    import torch
    import transformers

    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def write(name: str, result: dict[str, Any]) -> Path:
    """Write a result and print it."""
    RESULTS.mkdir(exist_ok=True)
    record = {
        "benchmark": name,
        "commit": commit(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        **result,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2), flush=True)
    return path
