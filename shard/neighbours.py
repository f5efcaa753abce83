"""Which other nodes run on this machine: each keeps a locked file in the cache folder, with its number of threads.

The lock goes with its process, however that ends, so a file that can be locked belongs to nobody any more.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import structlog

FILES_MAX = 1024
"""Files looked at; more nodes than that are on no machine."""
_SUFFIX = ".node"

log = structlog.stdlib.get_logger(__name__)


@contextmanager
def announced(folder: Path, threads: int) -> Iterator[list[int]]:
    """Within, other nodes know of this one. Gives the threads of each that is there already.

    Where the folder cannot be written, as in a read-only container, nobody is known; that is logged.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = list(_threads_of_others(folder))
        own = (folder / f"{os.getpid()}{_SUFFIX}").open("w", encoding="ascii")
    except OSError as error:
        log.info("neighbours.unknown", reason=str(error))
        yield []
        return
    with own:
        fcntl.flock(own, fcntl.LOCK_EX)
        own.write(str(threads))
        own.flush()
        try:
            yield others
        finally:
            Path(own.name).unlink(missing_ok=True)


def warn_of_threads(threads: int, others: list[int], cores: int) -> None:
    """Say so where nodes compute with more threads than there are cores: each step waits for its slowest thread."""
    total = threads + sum(others)
    if total <= cores:
        return
    nodes = len(others) + 1
    log.warning(
        "threads.too_many",
        threads=threads,
        other_nodes=len(others),
        other_threads=sum(others),
        cores=cores,
        reason=f"{total} threads on {cores} cores make every step wait: {_advice(nodes, cores)}",
    )


def _advice(nodes: int, cores: int) -> str:
    if nodes == 1:
        return f"give --threads {cores}"
    if nodes > cores:
        return f"run no more than {cores} nodes here, each with --threads 1"
    return f"give each of the {nodes} nodes here --threads {cores // nodes}"


def _threads_of_others(folder: Path) -> Iterator[int]:
    for path in sorted(folder.glob(f"*{_SUFFIX}"))[:FILES_MAX]:
        try:
            with path.open("r", encoding="ascii") as file:
                if _is_held(file):
                    yield _threads(file.read())
                else:
                    path.unlink(missing_ok=True)
        except FileNotFoundError:
            continue  # its node has just ended


def _is_held(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _threads(text: str) -> int:
    """A node that has only just begun has not written yet, and computes with one thread at least."""
    return int(text) if text.isdecimal() else 1
