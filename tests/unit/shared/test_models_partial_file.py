"""A file with holes says truthfully what it has, whatever happened to the process that wrote it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from pathlib import Path

import pytest

from shared.models.errors import ModelUnavailable
from shared.models.partial_file import (
    Piece,
    discard,
    is_partial,
    ledger_path,
    missing_spans,
    open_partial,
    read_ledger,
)
from shared.models.progress import Progress, ignore_progress
from shared.models.spans import Span

SIZE = 10_000
WHOLE = [Span(0, SIZE)]


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs in earnest."""


def add(path: Path, *pieces: tuple[int, bytes], killed: bool = False) -> None:
    """Fetch pieces, and be killed before the file is closed if so told."""
    with contextlib.suppress(Killed), open_partial(path, SIZE, ignore_progress) as writer:
        for start, data in pieces:
            writer.write(start, data)
            writer.record(Piece(Span(start, start + len(data)), hashlib.sha256(data).hexdigest()))
        if killed:
            raise Killed


def test_pieces_are_at_their_own_offsets_in_a_file_of_full_size(tmp_path: Path):
    """So that offsets are the original's; what is not there takes no room."""
    path = tmp_path / "w"
    add(path, (9000, b"x" * 1000))
    add(path, (10, b"abc"))
    assert path.stat().st_size == SIZE
    assert path.read_bytes()[10:13] == b"abc"
    assert read_ledger(path).spans == [Span(10, 13), Span(9000, SIZE)]
    assert missing_spans(path, [Span(0, 20)]) == [Span(0, 10), Span(13, 20)]
    assert is_partial(tmp_path)


def test_a_file_without_a_ledger_is_whole(tmp_path: Path):
    """Any model that came another way."""
    (tmp_path / "w").write_bytes(b"x")
    assert missing_spans(tmp_path / "w", WHOLE) == []
    assert not is_partial(tmp_path)


def test_pieces_of_a_killed_process_are_kept_if_they_are_what_they_were(tmp_path: Path):
    """One of two is damaged on disk: it alone is fetched again. What was closed before is not hashed."""
    path, checked = tmp_path / "w", list[Progress]()
    add(path, (500, b"closed"))
    add(path, (0, b"first"), (100, b"second"), killed=True)
    assert read_ledger(path).spans == [Span(500, 506)], "nobody reads what may have been lost"
    with path.open("r+b") as file:
        file.write(b"F")
    with open_partial(path, SIZE, checked.append):
        assert read_ledger(path).spans == [Span(100, 106), Span(500, 506)]
    assert checked[-1] == Progress("Checking w", 11, 11)


def test_a_closed_file_is_not_hashed_again(tmp_path: Path):
    """A node's start reads no gigabytes for it."""
    path, checked = tmp_path / "w", list[Progress]()
    add(path, (0, b"first"))
    with open_partial(path, SIZE, checked.append):
        pass
    assert checked == []


def test_what_came_before_an_error_is_kept(tmp_path: Path):
    """A connection that breaks costs one piece, not all."""
    path = tmp_path / "w"

    def fetch() -> None:
        with open_partial(path, SIZE, ignore_progress) as writer:
            writer.record(Piece(Span(3, 4), "any"))
            raise ModelUnavailable("download_failed", "cut")

    with pytest.raises(ModelUnavailable):
        fetch()
    assert read_ledger(path).spans == [Span(3, 4)]


@pytest.mark.parametrize("torn", ['{"start": 3, "en', "\x00\x00", '{"start": 1}', "[1]", '{"closed": tru'])
def test_a_torn_line_counts_for_nothing(tmp_path: Path, torn: str):
    """The machine lost power while it was written; what stands before is checked and kept."""
    path = tmp_path / "w"
    add(path, (0, b"first"), killed=True)
    with ledger_path(path).open("a") as ledger:
        ledger.write(torn)
    assert read_ledger(path).left_open
    add(path, (7, b"third"))
    assert read_ledger(path).spans == [Span(0, 5), Span(7, 12)]


def test_a_ledger_whose_file_has_gone_is_empty(tmp_path: Path):
    """Someone made room; holes are not taken for weights."""
    path = tmp_path / "w"
    add(path, (0, b"first"))
    path.unlink()
    add(path, (7, b"third"))
    assert read_ledger(path).spans == [Span(7, 12)]


def test_what_is_discarded_is_gone(tmp_path: Path):
    """Twice is no error."""
    add(tmp_path / "w", (0, b"first"))
    discard(tmp_path / "w")
    discard(tmp_path / "w")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_piece_uncounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was complete before stays."""
    path = tmp_path / "w"
    add(path, (0, b"first"))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(ModelUnavailable, match="the disk is full; MESHNET_CACHE_DIR") as caught:
            add(path, (100, b"second"))
    assert caught.value.code == "disk_full"
    assert read_ledger(path).spans == [Span(0, 5)]
    add(path, (100, b"second"))
    assert read_ledger(path).spans == [Span(0, 5), Span(100, 106)]


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The system may take less than it is given."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: write(descriptor, data[:2], offset))
    add(tmp_path / "w", (3, b"seven b"))
    assert (tmp_path / "w").read_bytes()[3:10] == b"seven b"
