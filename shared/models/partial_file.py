"""A file of which only some bytes have been fetched, and the ledger beside it that says which.

The file has its full size from the start and holes where nothing has been fetched, so offsets are those of the
original and several ranges of one model share it. The ledger is one JSON line for each piece: its span and the sha256
of what was received. ``{"closed": true}`` is written once the pieces before it are safely on disk; those after the last
such line are still being written, or were left by a process that was killed: nobody reads them, and whoever writes next
hashes them again before they count.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shared.models.errors import ModelUnavailable
from shared.models.progress import Progress, ProgressSink
from shared.models.spans import Span, merge, subtract, total_bytes

LEDGER_SUFFIX: Final = ".pieces"
HASH_CHUNK_BYTES: Final = 4 * 1024 * 1024
_CLOSED: Final = {"closed": True}
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that were received, and their sha256 in hexadecimal digits."""

    span: Span
    sha256: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """What a ledger says.

    Args:
        closed: Pieces that are safely on disk.
        left_open: Pieces that were received, and may have been lost since.
    """

    closed: tuple[Piece, ...] = ()
    left_open: tuple[Piece, ...] = ()

    @property
    def spans(self) -> list[Span]:
        """The bytes that are safely there."""
        return merge(piece.span for piece in self.closed)


def ledger_path(path: Path) -> Path:
    """Where the ledger of a file is."""
    return path.with_name(path.name + LEDGER_SUFFIX)


def is_partial(folder: Path) -> bool:
    """Whether a folder has files with holes."""
    return any(folder.glob(f"*{LEDGER_SUFFIX}"))


def missing_spans(path: Path, wanted: Sequence[Span]) -> list[Span]:
    """What of the wanted bytes is not safely there; nothing for a file without a ledger, which is whole."""
    return subtract(wanted, read_ledger(path).spans) if ledger_path(path).exists() else []


def read_ledger(path: Path) -> Ledger:
    """Read the ledger of a file; empty if there is none. A line that was left unfinished counts for nothing."""
    if not path.exists():
        return Ledger()
    try:
        lines = ledger_path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return Ledger()
    closed: list[Piece] = []
    left_open: list[Piece] = []
    for line in lines:
        value = _parse_line(line)
        if isinstance(value, Piece):
            left_open.append(value)
        elif value == _CLOSED:
            closed, left_open = [*closed, *left_open], []
    return Ledger(tuple(closed), tuple(left_open))


def _parse_line(line: str) -> Any:
    """A piece, or whatever else the line has; None if that cannot be read."""
    try:
        value: Any = json.loads(line)
        if value == _CLOSED:
            return value
        return Piece(Span(int(value["start"]), int(value["end"])), str(value["sha256"]))
    except (ValueError, TypeError, KeyError):
        return None


class PartialWriter:
    """Adds pieces to a file; made by `open_partial`. Safe to use from several threads at once.

    Args:
        descriptor: The file, open for reading and writing.
        ledger: The ledger, open for appending.
        name: For messages.
    """

    def __init__(self, descriptor: int, ledger: int, name: str) -> None:
        self._descriptor, self._ledger, self._name = descriptor, ledger, name

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes that count nothing before their piece is recorded.

        Raises:
            ModelUnavailable: `disk_full`.
        """
        view = memoryview(data)
        with _disk_errors(self._name):
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written

    def record(self, piece: Piece) -> None:
        """Say that a piece is there."""
        self._append({"start": piece.span.start, "end": piece.span.end, "sha256": piece.sha256})

    def close(self) -> None:
        """Say that everything recorded is safely on disk, once it is."""
        with _disk_errors(self._name):
            os.fsync(self._descriptor)
        self._append(_CLOSED)
        with _disk_errors(self._name):
            os.fsync(self._ledger)

    def _append(self, line: dict[str, Any]) -> None:
        with _disk_errors(self._name):
            encoded = json.dumps(line).encode() + b"\n"
            if os.write(self._ledger, encoded) != len(encoded):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def open_partial(path: Path, size_bytes: int, progress: ProgressSink) -> Iterator[PartialWriter]:
    """Open a file to add pieces; the caller holds its lock. Pieces that were left open are checked first.

    Leaving closes the ledger, also with a `ModelUnavailable`: what was recorded before is complete.

    Args:
        path: The file; made with its full size if it is not there.
        size_bytes: Its full size.
        progress: Told about the check.

    Raises:
        ModelUnavailable: `disk_full`.
    """
    kept = _check_pieces(path, progress)
    with _disk_errors(path.name):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with _disk_errors(path.name):
            os.truncate(descriptor, size_bytes)
            os.fsync(descriptor)
            _rewrite_ledger(path, kept)
            ledger = os.open(ledger_path(path), os.O_WRONLY | os.O_APPEND)
        try:
            writer = PartialWriter(descriptor, ledger, path.name)
            try:
                yield writer
            except ModelUnavailable:
                with suppress(ModelUnavailable):  # of a disk that is full, after what has already been raised
                    writer.close()
                raise
            writer.close()
        finally:
            os.close(ledger)
    finally:
        os.close(descriptor)


def _check_pieces(path: Path, progress: ProgressSink) -> tuple[Piece, ...]:
    """The pieces that are safely there, and of those left open the ones that are still what was received."""
    ledger = read_ledger(path)
    task, total, done = f"Checking {path.name}", total_bytes(piece.span for piece in ledger.left_open), 0
    kept = list(ledger.closed)
    for piece in ledger.left_open:
        if hash_span(path, piece.span) == piece.sha256:
            kept.append(piece)
        done += piece.span.nbytes
        progress(Progress(task, done, total))
    return tuple(kept)


def _rewrite_ledger(path: Path, pieces: Sequence[Piece]) -> None:
    """A ledger of these pieces, closed, in the old one's place at once."""
    new = ledger_path(path).with_suffix(".new")
    lines = [{"start": p.span.start, "end": p.span.end, "sha256": p.sha256} for p in pieces]
    new.write_text("".join(json.dumps(line) + "\n" for line in (*lines, _CLOSED)), encoding="utf-8")
    new.replace(ledger_path(path))


def hash_span(path: Path, span: Span) -> str:
    """The sha256 of some bytes of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(span.start)
        left = span.nbytes
        while left and (chunk := file.read(min(left, HASH_CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def discard(path: Path) -> None:
    """Forget a file whose bytes are wrong: the ledger first, so that nothing counts in between."""
    ledger_path(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


@contextmanager
def _disk_errors(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno in _FULL else str(error.strerror or error)
        message = f"{name} cannot be written: {reason}; MESHNET_CACHE_DIR names another folder"
        raise ModelUnavailable("disk_full", message, file=name) from error
