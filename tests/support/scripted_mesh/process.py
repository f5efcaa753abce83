"""A scripted mesh as a child process, for tests.

Each is forked from one process that has imported everything: two seconds of a processor that each would take alone.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx

from tests.support.fleet import child_env, wait_until

STOP_TIMEOUT_S = 10.0
READY = "ready "
_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload([f"{__package__}.__main__"])


@dataclass
class RunningMesh:
    """A scripted mesh that serves.

    Args:
        base_url: What a client is given, ``/v1`` included.
        process: To be looked at and killed.
        http: Relative to the gateway's root.
    """

    base_url: str
    process: BaseProcess
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
        said, stdout = _forking.Pipe(duplex=False)
        process = _forking.Process(target=_serve, args=([*arguments, "--", *flags], stdout, log.name, child_env()))
        process.start()
        stdout.close()
        try:
            base_url = _read_ready(process, said, log)
            with httpx.Client(base_url=base_url.removesuffix("/v1"), timeout=30) as http:
                yield RunningMesh(base_url, process, http)
        finally:
            _end(process)
            said.close()


def _serve(arguments: list[str], stdout: Connection, log: str, env: dict[str, str]) -> None:
    """What the child does: the command, with this environment and these streams."""
    from tests.support.scripted_mesh.__main__ import main

    os.environ.clear()
    os.environ.update(env)
    os.dup2(stdout.fileno(), 1)
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.argv = [__package__, *arguments]
    raise SystemExit(main())


def _read_ready(process: BaseProcess, said: Connection, log: Any) -> str:
    with os.fdopen(os.dup(said.fileno())) as stdout:
        line = stdout.readline()
    if not line.startswith(READY):
        process.join(STOP_TIMEOUT_S)
        log.seek(0)
        raise RuntimeError(f"the scripted mesh ended with {process.exitcode}: {log.read()[-3000:]}")
    return line.removeprefix(READY).strip()


def _end(process: BaseProcess) -> None:
    process.terminate()
    process.join(STOP_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()
