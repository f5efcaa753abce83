"""A scripted mesh as a child process, for tests."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.fleet import REPO, child_env, wait_until

STOP_TIMEOUT_S = 10.0
READY = "ready "


@dataclass
class RunningMesh:
    """A scripted mesh that serves.

    Args:
        base_url: What a client is given, ``/v1`` included.
        process: To be looked at and killed.
        http: Relative to the gateway's root.
    """

    base_url: str
    process: subprocess.Popen[str]
    http: httpx.Client

    def figures(self) -> dict[str, Any]:
        """GET /mesh."""
        return dict(self.http.get("/mesh").json())

    def wait_idle(self, timeout_s: float = 1.0) -> None:
        """Until no generation runs or waits, and no node holds a session.

        Raises:
            TimeoutError: Some still do.
        """

        def is_idle() -> bool:
            figures = self.figures()
            gateway = figures["gateway"]
            held = sum(node["sessions"] for node in figures["nodes"] if node["state"] == "ready")
            return not (gateway["active"] or gateway["queued"] or held)

        wait_until(is_idle, "the end of all generations", timeout_s)


@contextlib.contextmanager
def running_scripted_mesh(
    script: dict[str, Any] | Path, *, model: Path | None = None, flags: tuple[str, ...] = ()
) -> Iterator[RunningMesh]:
    """Serve a script while the context lasts.

    Args:
        script: As the package's docstring describes it, or a file that holds one.
        model: A folder with tokenizer and configs, instead of the one that is made up.
        flags: More flags of the gateway.

    Raises:
        RuntimeError: It ended before it was ready; the message has its last words.
    """
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        file = script if isinstance(script, Path) else Path(folder) / "script.json"
        if not isinstance(script, Path):
            file.write_text(json.dumps(script))
        arguments = [
            "--script",
            str(file),
            "--port",
            "0",
            "--exit-with-parent",
            *(["--model", str(model)] if model else []),
        ]
        command = [sys.executable, "-m", __package__, *arguments, "--", *flags]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, cwd=REPO, env=child_env(), text=True
        )
        with process:
            try:
                base_url = _read_ready(process, log)
                with httpx.Client(base_url=base_url.removesuffix("/v1"), timeout=30) as http:
                    yield RunningMesh(base_url, process, http)
            finally:
                _end(process)


def _read_ready(process: subprocess.Popen[str], log: Any) -> str:
    line = process.stdout.readline() if process.stdout else ""
    if not line.startswith(READY):
        process.wait(STOP_TIMEOUT_S)
        log.seek(0)
        raise RuntimeError(f"the scripted mesh ended with {process.returncode}: {log.read()[-3000:]}")
    return line.removeprefix(READY).strip()


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
