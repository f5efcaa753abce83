"""Nodes on one machine know of each other's threads, and say when there are too many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shard.neighbours import announced, warn_of_threads

OTHER = """
import sys, time
from pathlib import Path
from shard.neighbours import announced
with announced(Path(sys.argv[1]), 3):
    print("there", flush=True)
    sys.stdin.read()
"""


def test_a_node_is_known_while_it_runs_and_not_once_it_was_killed(tmp_path: Path):
    """Its lock goes with its process; the file it leaves is cleared away by the next."""
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        with announced(tmp_path, 1) as others:
            assert others == [3]
        other.kill()
        other.wait()
    with announced(tmp_path, 1) as others:
        assert others == []
        assert [path.name for path in tmp_path.iterdir()] == [f"{os.getpid()}.node"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_keeps_no_node_from_serving(tmp_path: Path):
    """Nobody is known then, and the log says why."""
    (tmp_path / "nodes").write_text("a file")
    with capture_logs() as logs, announced(tmp_path / "nodes", 1) as others:
        assert others == []
    assert [line["event"] for line in logs] == ["neighbours.unknown"]


@pytest.mark.parametrize(
    ("threads", "others", "advice"),
    [
        (2, [2], "4 threads on 2 cores make every step wait: give each of the 2 nodes here --threads 1"),
        (8, [], "8 threads on 2 cores make every step wait: give --threads 2"),
        (1, [1], None),
        (2, [], None),
    ],
)
def test_too_many_threads_are_warned_of_with_what_to_give(threads: int, others: list[int], advice: str | None):
    """Only where they are more than the cores."""
    with capture_logs() as logs:
        warn_of_threads(threads, others, 2)
    assert [line["reason"] for line in logs] == ([] if advice is None else [advice])
