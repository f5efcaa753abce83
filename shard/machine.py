"""What this machine has for a node: cores and memory, within the limits set to this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory as a process sees it.

    Args:
        used_bytes: What the process has there: resident on the machine's memory, reserved by torch on another device.
        free_bytes: What it could still have now.
        limit_bytes: What there is in all: the device's memory, or a container's limit.
    """

    used_bytes: int
    free_bytes: int
    limit_bytes: int


def physical_cores() -> int:
    """Cores this process may use, without the second threads of a core: those only contend for its units."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))


def machine_memory(cgroups: Path = _CGROUPS, own_cgroup: Path = _OWN_CGROUP) -> Memory:
    """The machine's memory, or what a control group leaves of it where that is less."""
    machine = psutil.virtual_memory()
    free, limit = int(machine.available), int(machine.total)
    for group in _groups(cgroups, own_cgroup):
        group_limit, taken = _read_count(group / "memory.max"), _read_count(group / "memory.current")
        if group_limit is None or taken is None:
            continue
        limit = min(limit, group_limit)
        free = min(free, group_limit - taken + _reclaimable(group))
    return Memory(resident_bytes(), max(0, free), limit)


def resident_bytes() -> int:
    """What this process has in memory."""
    return int(psutil.Process().memory_info().rss)


def _groups(cgroups: Path, own_cgroup: Path) -> Iterator[Path]:
    """This process's control group and those around it, each of which may have a limit; within a container the root."""
    try:
        lines = own_cgroup.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    own = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    group = cgroups / own
    yield group
    while group != cgroups and cgroups in group.parents:
        group = group.parent
        yield group


def _reclaimable(group: Path) -> int:
    """Cached files, which count as the group's and give way to whoever needs memory."""
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    counts = dict(line.split(" ", 1) for line in lines if " " in line)
    return sum(int(counts.get(name, 0)) for name in ("active_file", "inactive_file"))


def _read_count(path: Path) -> int | None:
    """The number in a control group's file; None where there is none, or no limit (``max``)."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
