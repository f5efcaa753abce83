"""One file over HTTP, continued where an earlier attempt stopped, also one of an earlier process.

`huggingface_hub` starts a file again when the process that fetched it was killed; a catalogue file is one of
hundreds of megabytes under a pinned hash, for which continuing is both safe and worth it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import httpx

from shared.models.errors import ModelUnavailable
from shared.models.progress import Progress, ProgressSink

READ_TIMEOUT_S: Final = 20.0
"""A connection that gives nothing for so long is dropped and opened again."""
CONNECT_TIMEOUT_S: Final = 4.0
TIMEOUT: Final = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
FRUITLESS_ATTEMPTS_MAX: Final = 3
"""Attempts in a row that bring no byte; one that brings some starts the count again."""
RETRY_WAIT_S: Final = 1.0
REPORT_BYTES: Final = 2 * 1024 * 1024
_GONE: Final = (401, 403, 404, 410)


def download(
    url: str,
    target: Path,
    size_bytes: int,
    *,
    headers: Mapping[str, str],
    progress: ProgressSink,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Make `target` the whole file, asking only for what it lacks. Its content is not verified here.

    Args:
        url: Where it is; redirects are followed.
        target: The file; what it holds already is taken for the beginning.
        size_bytes: Its full size.
        headers: Sent along, to the first host only.
        progress: Told about bytes.
        sleep: Waits between attempts.

    Raises:
        ModelUnavailable: `unknown_model` when the server does not have or not give it, `download_failed` when the
            connection keeps breaking.
    """
    fruitless = 0
    while True:
        held_before = _held_bytes(target, size_bytes)
        if held_before == size_bytes:
            progress(Progress(f"Downloading {target.name}", size_bytes, size_bytes))
            return
        reason = _attempt(url, target, held_before, size_bytes, headers, progress)
        fruitless = 0 if _held_bytes(target, size_bytes) > held_before else fruitless + 1
        if fruitless >= FRUITLESS_ATTEMPTS_MAX:
            raise ModelUnavailable(
                "download_failed",
                f"downloading {url} failed at byte {held_before:,}: {reason}; a new attempt goes on from there",
            )
        if reason is not None:
            sleep(RETRY_WAIT_S)


def _held_bytes(target: Path, size_bytes: int) -> int:
    """How much of the file is there; more than all of it is not a beginning of it."""
    held = target.stat().st_size if target.exists() else 0
    if held > size_bytes:
        target.unlink()
        return 0
    return held


def _attempt(  # noqa: PLR0917 - one call, split off for its length
    url: str, target: Path, start: int, size_bytes: int, headers: Mapping[str, str], progress: ProgressSink
) -> str | None:
    """Ask once and write what comes; None if all came, else why not."""
    asked = {**headers, "Range": f"bytes={start}-"} if start else dict(headers)
    asked["Accept-Encoding"] = "identity"
    try:
        with httpx.stream("GET", url, headers=asked, timeout=TIMEOUT, follow_redirects=True) as response:
            if response.status_code in _GONE:
                raise ModelUnavailable("unknown_model", f"{url} answers {response.status_code}")
            response.raise_for_status()
            _write(
                response,
                target,
                start if response.status_code == httpx.codes.PARTIAL_CONTENT else 0,
                size_bytes,
                progress,
            )
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return None


def _write(response: httpx.Response, target: Path, start: int, size_bytes: int, progress: ProgressSink) -> None:
    """Append from `start`; a server that ignores ranges sends the whole file, which then begins anew."""
    done = reported = start
    with target.open("ab" if start else "wb") as file:
        for chunk in response.iter_raw():
            file.write(chunk)
            done += len(chunk)
            if done - reported >= REPORT_BYTES or done == size_bytes:
                reported = done
                progress(Progress(f"Downloading {target.name}", done, size_bytes))
