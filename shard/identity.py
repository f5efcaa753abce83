"""A node's own name, the same after a restart, and another one for each node that runs on a machine at once.

::

    <cache>/nodes/<host>-1.id      the name of the first node on this host
    <cache>/nodes/<host>-1.lock    held while it runs
    <cache>/nodes/<host>-2.id      that of a second one beside it, and so on

A gateway knows a node that comes back by its name: it is not a second one.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from shard.settings import parse_node_id
from shared.options import SettingError

NODES_AT_ONCE_MAX = 256
"""More processes than one machine has cores to give them."""
HOST_CHARS_MAX = 32
"""Of the host's name; the rest of an id is the random part."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A name, and the lock that keeps it to this process until the process ends."""

    node_id: str
    lock: FileLock


def take_identity(cache: Path, host: str) -> Identity:
    """The first name of this host that no running process has, made if there is none yet.

    Args:
        cache: The cache folder.
        host: This machine's name.

    Raises:
        SettingError: Nothing can be written there.
    """
    host = "".join(char if char.isalnum() or char in "-." else "-" for char in host)[:HOST_CHARS_MAX] or "node"
    folder = cache / "nodes"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, NODES_AT_ONCE_MAX + 1):
            lock = FileLock(folder / f"{host}-{number}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            return Identity(_read_or_make(folder / f"{host}-{number}.id", host), lock)
    except OSError as error:
        raise SettingError("--cache-dir", f"{folder} cannot be written: {error.strerror or error}") from error
    raise SettingError("--node-id", f"{NODES_AT_ONCE_MAX} nodes run on this machine already: give the id")


def _read_or_make(path: Path, host: str) -> str:
    try:
        return parse_node_id(path.read_text(encoding="utf-8").strip())
    except (FileNotFoundError, ValueError):
        node_id = f"{host}-{uuid.uuid4().hex[:8]}"
        path.write_text(f"{node_id}\n", encoding="utf-8")
        return node_id
