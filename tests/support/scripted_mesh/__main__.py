"""`python -m tests.support.scripted_mesh`: serve a script until told to end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

import uvloop

import tests.support.scripted_mesh as package
from shared.log import configure_logging
from shared.options import SettingError
from shared.parent_watch import exit_with_parent
from tests.support.scripted_mesh.model import build_model
from tests.support.scripted_mesh.process import READY
from tests.support.scripted_mesh.script import ScriptError, read_script
from tests.support.scripted_mesh.server import serve_script

EXIT_BAD_SETTING = 2


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {package.__name__}",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--script", type=Path, required=True, metavar="FILE")
    parser.add_argument("--port", type=int, default=0, help="where the gateway listens; 0 lets the system choose")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="whose tokenizer and configs to use")
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--exit-with-parent", action="store_true", help="end when the process that started this does")
    parser.add_argument("flags", nargs="*", metavar="GATEWAY FLAG", help="after --; see python -m gateway --help")
    return parser.parse_args(arguments)


async def run(arguments: argparse.Namespace) -> None:
    """Read the script, make the model up if need be, serve."""
    script = read_script(arguments.script)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or build_model(Path(scratch) / "model", script.model)
        flags = [*script.gateway, *arguments.flags]
        ready = partial(_announce, sys.stdout)
        await serve_script(script, folder, port=arguments.port, flags=flags, ready=ready)


def _announce(stdout: TextIO, base_url: str) -> None:
    stdout.write(f"{READY}{base_url}\n")
    stdout.flush()


def main() -> int:
    """Run the command; what is wrong with script or flags is one line."""
    arguments = parse_arguments()
    if arguments.exit_with_parent:
        exit_with_parent()
    configure_logging(level=arguments.log_level, json=None)
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of what a gateway does on purpose
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            loop.run(run(arguments))
    except (ScriptError, SettingError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_SETTING
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
