"""`python -m shard`: one node, holding one layer range of one model."""

from __future__ import annotations

from shared.extras import require_extra

require_extra("shard")  # before the imports that would end in a traceback

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shard.node import LoadRunner, Node, Progress, stopped_by_signals
from shard.options import node_options, read_settings
from shard.runner import Runner
from shard.service import NodeService, ServedModel
from shard.settings import Address, NodeSettings, check_layers
from shared.cli.display import open_display
from shared.clock import SystemClock
from shared.log import configure_logging
from shared.models.errors import ModelUnavailable
from shared.models.folder import ModelFolder, read_config
from shared.models.source import resolve_outline
from shared.options import SettingError
from shared.parent_watch import exit_with_parent as start_parent_watch

EXIT_BAD_SETTING = 2


HELP = """Run one node: load a range of a model's decoder layers and serve it to gateways.

A gateway that is given the nodes of a whole model (each begins where the one before ends) serves it
as one. Two halves of a model of 24 layers, on one machine:

\b
  python -m shard --model MODEL --layers 0:12  --listen 127.0.0.1:9001
  python -m shard --model MODEL --layers 12:24 --listen 127.0.0.1:9002
  python -m gateway --model MODEL --node ws://127.0.0.1:9001 --node ws://127.0.0.1:9002

The node listens at once and loads then. On its port, GET /readyz answers 200 once it serves, and
GET /healthz says what it is doing. It ends with 0 when told to, with 1 when its layers cannot be
loaded, with 2 when a setting is wrong.
"""


@click.command("shard", help=HELP, context_settings={"show_default": True, "max_content_width": 110})
@node_options
def command(**options: Any) -> int:
    """Read settings and model, then serve. `HELP` is what people see."""
    if options["exit_with_parent"]:
        start_parent_watch()
    log_format = options["log_format"]
    configure_logging(level=options["log_level"], json=None if log_format == "auto" else log_format == "json")
    settings = read_settings(options)
    folder = find_model(settings.model, options["cache_dir"])
    config = read_config(folder.path)
    check_layers(settings.layers, config.num_layers)
    model = ServedModel(folder.fingerprint, folder.name, config.num_layers, config.context_len)
    with asyncio.Runner(loop_factory=event_loop_factory()) as loop:
        code, compute_ended = loop.run(serve(settings, model, folder))
    if not compute_ended:
        # A thread inside a native call cannot be ended, and the interpreter would tear down under it.
        sys.stderr.flush()
        os._exit(code)
    return code


def find_model(name: str, cache_dir: Path | None) -> ModelFolder:
    """The model's folder, converted with progress shown if need be; of a hub model, weights are fetched when loading.

    Raises:
        SettingError: There is no such model, or it cannot be had.
    """
    try:
        with open_display() as display:
            return resolve_outline(name, cache_dir=cache_dir, progress=display.show)
    except ModelUnavailable as error:
        raise SettingError("--model", error.message) from error


async def serve(settings: NodeSettings, model: ServedModel, folder: ModelFolder) -> tuple[int, bool]:
    """Run the node. Returns its exit code, and whether its compute thread has ended.

    Raises:
        SettingError: The address cannot be listened on.
    """
    clock = SystemClock()
    service = NodeService(
        node_id=settings.node_id, model=model, layers=settings.layers, limits=settings.kv, clock=clock
    )
    node = Node(
        service=service,
        address=settings.listen,
        token=settings.mesh_token,
        load=create_loader(settings, folder),
        clock=clock,
        drain_timeout_s=settings.drain_s,
        announce=announce,
    )
    with stopped_by_signals(node.stop):
        try:
            return await node.run(), node.compute_ended
        except OSError as error:
            raise SettingError("--listen", f"{settings.listen}: {error.strerror or error}") from error


def create_loader(settings: NodeSettings, folder: ModelFolder) -> LoadRunner:
    """What loads the stage, on the compute thread."""

    def load(progress: Progress) -> Runner:
        from shard.load import load_runner  # noqa: PLC0415 - torch takes seconds to import; the node listens first

        return load_runner(settings, folder, progress)

    return load


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where there is one: it halves what a hop adds."""
    try:
        import uvloop  # noqa: PLC0415 - there is none for Windows
    except ImportError:
        return None
    return uvloop.new_event_loop


def announce(address: Address) -> None:
    """Print where the node listens, for whoever started it with port 0."""
    click.echo(f"listening on ws://{address}")


def main() -> int:
    """Run the command; what is wrong with a setting is one line that names it."""
    try:
        return int(command.main(prog_name="python -m shard", standalone_mode=False) or 0)
    except click.UsageError as error:
        return _refuse(error.format_message())
    except SettingError as error:
        return _refuse(str(error))
    except click.Abort:
        return 130


def _refuse(reason: str) -> int:
    click.echo(f"error: {' '.join(reason.split())}", err=True)
    return EXIT_BAD_SETTING


if __name__ == "__main__":
    sys.exit(main())
