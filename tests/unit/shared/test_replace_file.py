"""A small file is replaced as a whole, whoever else does the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.replace_file import replace_file


def test_many_threads_may_write_one_file(tmp_path: Path):
    """Each finds its own way there; the content is one of theirs, and nothing lies beside it."""
    path = tmp_path / "file"
    contents = [bytes([number]) * 10_000 for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        for write in [threads.submit(replace_file, path, content) for content in contents]:
            write.result()
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_old(tmp_path: Path):
    """And no partial file."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").write_text("")
    with pytest.raises(OSError, match="folder"):
        replace_file(tmp_path / "folder", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
