"""What this machine has for a node: cores and memory, within the limits set to this process."""

from __future__ import annotations

import os
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_CGROUP = Path("/sys/fs/cgroup")


def physical_cores() -> int:
    """Cores this process may use, without the second threads of a core: those only contend for its units."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))


def free_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory that could be allocated now: the machine's, or what the container's limit leaves if that is less."""
    available = int(psutil.virtual_memory().available)
    limit, used = _read_count(cgroup / "memory.max"), _read_count(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    return max(0, min(available, limit - used))


def resident_bytes() -> int:
    """What this process has in memory."""
    return int(psutil.Process().memory_info().rss)


def _read_count(path: Path) -> int | None:
    """The number in a control group's file; None where there is none, or no limit (``max``)."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
