"""The cache folder: where things lie in it, one writer at a time, hashes, and room on the disk.

::

    <cache>/downloads/   GGUF files under their final names, complete and verified
    <cache>/models/      converted folders, complete
    <cache>/parts/       models of which only some byte ranges have been fetched (`shared.models.part_folder`)
    <cache>/partial/     what is still being fetched; safe to delete
    <cache>/locks/       one lock file per name
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout
from rich.filesize import decimal

from shared.models.errors import ModelUnavailable
from shared.models.progress import Progress, ProgressSink

HASH_CHUNK_BYTES: Final = 4 * 1024 * 1024
LOCK_TIMEOUT_S: Final = 3600.0
"""As long as the slowest download worth waiting for; a holder that dies frees its lock at once."""
_SPARE_BYTES: Final = 64 * 1024 * 1024
"""What a disk should have left afterwards."""


def default_cache_dir(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Where the platform keeps what can be fetched again: ``~/.cache/meshnet`` on Linux."""
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "meshnet"
    if platform == "win32":
        return Path(environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "meshnet" / "Cache"
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshnet"


@dataclass(frozen=True, slots=True)
class Store:
    """A cache folder; nothing is created before it is needed."""

    root: Path

    @property
    def downloads(self) -> Path:
        """Complete, verified files."""
        return _made(self.root / "downloads")

    @property
    def models(self) -> Path:
        """Complete model folders."""
        return _made(self.root / "models")

    @property
    def parts(self) -> Path:
        """Folders of models that are there in part."""
        return _made(self.root / "parts")

    def partial(self, name: str) -> Path:
        """The folder in which `name` is put together."""
        return _made(self.root / "partial" / name)

    @contextlib.contextmanager
    def lock(self, name: str, work: str, progress: ProgressSink) -> Iterator[None]:
        """Hold the name, so that two processes do its work once.

        Args:
            name: What is worked on.
            work: What the other process may be doing, for people: ``fetch x``.
            progress: Told about the wait for another process, if there is one.

        Raises:
            ModelUnavailable: `download_failed`, after `LOCK_TIMEOUT_S`.
        """
        lock = FileLock(_made(self.root / "locks") / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            task = f"Waiting for another process to {work}"
            progress(Progress(task))
            try:
                lock.acquire(timeout=LOCK_TIMEOUT_S)
            except Timeout as error:
                raise ModelUnavailable(
                    "download_failed", f"another process has held {name} for {LOCK_TIMEOUT_S:.0f} s", name=name
                ) from error
            progress(Progress.finished(task))
        try:
            yield
        finally:
            lock.release()


def file_sha256(path: Path, progress: ProgressSink) -> str:
    """Hash of a file's content."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(Progress(f"Verifying {path.name}", done, total))
    return digest.hexdigest()


def verify_sha256(path: Path, expected: str, progress: ProgressSink) -> None:
    """Compare a file's hash, and remove the file if it is wrong.

    Raises:
        ModelUnavailable: `hash_mismatch`, naming both hashes.
    """
    found = file_sha256(path, progress)
    if found == expected:
        return
    path.unlink()
    raise ModelUnavailable(
        "hash_mismatch",
        f"{path.name} has sha256 {found}, expected {expected}; the file was removed",
        found=found,
        expected=expected,
    )


def require_space(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Whether the disk has room, asked before anything is fetched.

    Raises:
        ModelUnavailable: `disk_full`, naming what is free and what is needed.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes + _SPARE_BYTES:
        raise ModelUnavailable(
            "disk_full",
            f"{purpose} needs {decimal(needed_bytes)}, and {folder} has {decimal(free_bytes)} free; "
            "MESHNET_CACHE_DIR names another folder",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelUnavailable(
            "disk_full", f"{folder} cannot be created ({error}); MESHNET_CACHE_DIR names another folder"
        ) from error
    return folder
