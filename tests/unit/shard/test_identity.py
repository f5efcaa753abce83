"""A joining node's name: the same after a restart, another one for a second node beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shard import identity
from shard.identity import take_identity
from shard.settings import parse_node_id
from shared.options import SettingError
from tests.support.fleet import REPO


def test_name_stays_after_the_process_ends(tmp_path: Path) -> None:
    """A process that was killed leaves no lock behind; the next is itself again."""
    code = "from shard.identity import take_identity; from pathlib import Path; import os; "
    code += f"print(take_identity(Path({str(tmp_path)!r}), 'host').node_id, flush=True); os.kill(os.getpid(), 9)"
    names = {
        subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False).stdout
        for _ in range(2)
    }
    assert len(names) == 1
    assert take_identity(tmp_path, "host").node_id == names.pop().strip()


def test_nodes_at_once_have_names_of_their_own(tmp_path: Path) -> None:
    """Each takes the first free one, so that whichever restarts finds its own."""
    first, second = take_identity(tmp_path, "host"), take_identity(tmp_path, "host")
    assert first.node_id != second.node_id
    first.lock.release()
    assert take_identity(tmp_path, "host").node_id == first.node_id


def test_hosts_that_share_a_cache_have_names_of_their_own(tmp_path: Path) -> None:
    """The host is part of it, whatever characters it is made of and however long it is."""
    names = [take_identity(tmp_path, host).node_id for host in ("a", "b", "ü/..%", "x" * 300, "")]
    assert len(set(names)) == len(names)
    assert [parse_node_id(name) for name in names] == names
    assert {path.parent for path in tmp_path.rglob("*.id")} == {tmp_path / "nodes"}


def test_damaged_name_is_replaced(tmp_path: Path) -> None:
    """An empty file is no name."""
    taken = take_identity(tmp_path, "host")
    taken.lock.release()
    (tmp_path / "nodes" / "host-1.id").write_text("\n")
    renewed = take_identity(tmp_path, "host")
    assert parse_node_id(renewed.node_id) != taken.node_id


def test_number_of_names_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node too many is told to name itself."""
    monkeypatch.setattr(identity, "NODES_AT_ONCE_MAX", 1)
    held = take_identity(tmp_path, "host")
    with pytest.raises(SettingError, match="--node-id: 1 nodes run"):
        take_identity(tmp_path, "host")
    held.lock.release()


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file where the folder should be."""
    (tmp_path / "nodes").write_text("")
    with pytest.raises(SettingError, match=f"--cache-dir: {tmp_path}/nodes cannot be written"):
        take_identity(tmp_path, "host")
