"""`python -m shard`: one node, holding one layer range of one model."""

from __future__ import annotations

from shared.extras import require_extra

require_extra("shard")  # before the imports that would end in a traceback

import asyncio
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any

import click
import structlog

from shard.assignment import Assignment, Loading, LoadRange, ServedModel
from shard.device_check import check_device
from shard.find_weights import find_weights
from shard.identity import take_identity
from shard.join import Join
from shard.machine import physical_cores
from shard.machine_info import describe_machine
from shard.neighbours import announced, warn_of_threads
from shard.node import Node, stopped_by_signals
from shard.options import node_options, read_settings
from shard.runner import Runner
from shard.service import NodeService
from shard.settings import Address, NodeSettings, check_layers
from shared.cli.display import open_display
from shared.clock import SystemClock
from shared.errors import LoadFailed
from shared.layers import LayerRange
from shared.log import configure_logging
from shared.messages import MachineInfo
from shared.models.errors import ModelUnavailable
from shared.models.folder import ModelFolder, read_config
from shared.models.source import resolve_outline
from shared.models.store import default_cache_dir
from shared.options import SettingError
from shared.parent_watch import exit_with_parent as start_parent_watch
from shared.process_end import end_process
from shared.program_name import program_name

EXIT_BAD_SETTING = 2

log = structlog.stdlib.get_logger(__name__)


HELP = """Run one node: load a range of a model's decoder layers and serve it to gateways.

A machine that joins a gateway needs nothing else: it says what it has, is given layers, fetches what it lacks of
them, and may be given others later.

\b
  meshnet shard --join wss://gateway.example

Or its layers are fixed. A gateway that is given the nodes of a whole model (each begins where the one before ends)
serves it as one. Two halves of a model of 24 layers, on one machine:

\b
  meshnet shard --model MODEL --layers 0:12  --listen 127.0.0.1:9001
  meshnet shard --model MODEL --layers 12:24 --listen 127.0.0.1:9002
  meshnet gateway --model MODEL --node ws://127.0.0.1:9001 --node ws://127.0.0.1:9002

The node listens at once and loads then. On its port, if it has one, GET /readyz answers 200 once it serves, and
GET /healthz says what it is doing. It ends with 0 when told to, with 1 when the layers that it was started for cannot
be loaded, with 2 when a setting is wrong.
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
    if settings.joins:
        log.info("node.starting", gateways=list(settings.joins), reason="reading torch takes some seconds")
    check_device(settings.device)
    cache = options["cache_dir"] or default_cache_dir(os.environ)
    identity = None if settings.node_id else take_identity(cache, socket.gethostname())  # is held to the end
    start = Start(
        settings=settings,
        node_id=settings.node_id or (identity.node_id if identity else ""),
        cache=cache,
        fixed=None if settings.layers is None else find_fixed(settings, settings.layers, options["cache_dir"]),
        machine=None if settings.layers is not None else find_machine(settings, cache),
    )
    if settings.joins:
        import_loader()
    with (
        announced(cache / "running", settings.threads) as others,
        asyncio.Runner(loop_factory=event_loop_factory()) as loop,
    ):
        warn_of_threads(settings.threads, others, physical_cores())
        return loop.run(serve(start))


@dataclass(frozen=True, slots=True)
class Start:
    """Everything that is known before the event loop runs: either a range, or what the machine offers.

    Args:
        settings: As given.
        node_id: The node's.
        cache: The cache folder.
        fixed: The range that was asked for, and the folder of its model.
        machine: What is said to gateways that give it a range.
    """

    settings: NodeSettings
    node_id: str
    cache: Path
    fixed: tuple[Assignment, ModelFolder] | None
    machine: MachineInfo | None


def find_fixed(settings: NodeSettings, layers: LayerRange, cache_dir: Path | None) -> tuple[Assignment, ModelFolder]:
    """The range that the settings name.

    Raises:
        SettingError: There is no such model, or it has no such layers.
    """
    folder = find_model(settings.model or "", cache_dir)
    config = read_config(folder.path)
    check_layers(layers, config.num_layers)
    model = ServedModel(folder.fingerprint, folder.name, config.num_layers, config.context_len)
    return Assignment(model, layers), folder


def find_machine(settings: NodeSettings, cache: Path) -> MachineInfo:
    """What this machine offers, measured on a thread that ends with it.

    Raises:
        SettingError: There is no such device.
    """
    try:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(describe_machine, settings, cache, os.environ).result()
    except LoadFailed as error:
        raise SettingError("--device", error.message) from error


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


async def serve(start: Start) -> int:
    """Run the node. Returns its exit code.

    Raises:
        SettingError: The address cannot be listened on.
    """
    clock = SystemClock()
    settings = start.settings
    service = NodeService(
        node_id=start.node_id, limits=settings.kv, clock=clock, load=create_loader(start), machine=start.machine
    )
    joins = [
        Join(url, service=service, clock=clock, rng=SystemRandom(), dial=settings.access.dial) for url in settings.joins
    ]
    node = Node(
        service=service,
        fixed=start.fixed[0] if start.fixed else None,
        address=settings.listen,
        joins=joins,
        access=settings.access,
        clock=clock,
        drain_timeout_s=settings.drain_s,
        announce=announce_secure if settings.access.listen_context else announce,
    )
    with stopped_by_signals(node.stop):
        try:
            code = await node.run()
        except OSError as error:
            raise SettingError("--listen", f"{settings.listen}: {error.strerror or error}") from error
    if code and service.load_error is not None:
        click.echo(f"error: {service.load_error}", err=True)
    return code


def import_loader() -> None:
    """Import torch before a gateway is dialled: it holds up the whole process, and silence ends a link."""
    from shard import load  # noqa: F401, PLC0415 - a node that only listens does so at once


def create_loader(start: Start) -> LoadRange:
    """What loads a range, on its compute thread."""

    def load(assignment: Assignment, loading: Loading) -> Runner:
        from shard.load import load_runner  # noqa: PLC0415 - torch takes seconds to import; the node listens first

        if start.fixed is not None:
            folder = start.fixed[1]
        else:
            folder = find_weights(assignment, loading, settings=start.settings, cache=start.cache)
        return load_runner(start.settings, folder, assignment.layers, loading, cache_dir=start.cache)

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


def announce_secure(address: Address) -> None:
    """As `announce`, with TLS."""
    click.echo(f"listening on wss://{address}")


def main() -> int:
    """Run the command; what is wrong with a setting is one line that names it."""
    try:
        return int(command.main(prog_name=program_name("shard", os.environ), standalone_mode=False) or 0)
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
    end_process(main())
