"""`python -m gateway`: HTTP on one side, the nodes of one model on the other."""

from __future__ import annotations

import os

from shared.extras import require_extra

require_extra("gateway")  # before the imports that would end in a traceback
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise a gateway to install torch

import asyncio
import logging
import socket
import time
import uuid
from typing import Any

import click
import uvloop

from gateway.app import create_app
from gateway.dialler import dialling
from gateway.fleet.create import create_drainer, create_fleet
from gateway.fleet.live import FleetModel
from gateway.generation import create_generator
from gateway.joins import Joins
from gateway.link_listener import LinkListener
from gateway.mesh import create_mesh
from gateway.mesh_view import MeshView
from gateway.model_files import MODEL_FILES_PATH, ModelFiles
from gateway.options import gateway_options, read_settings
from gateway.server import create_server, ended_by_signals, http_url, listen
from gateway.settings import GatewaySettings
from gateway.state import GatewayState, ServedModel
from gateway.tokenizer import ChatTokenizer, TokenizerError, load_tokenizer
from shared.cli.display import open_display
from shared.clock import SystemClock
from shared.log import configure_logging
from shared.models.catalogue import find_entry
from shared.models.errors import ModelUnavailable
from shared.models.folder import ModelFolder, read_config
from shared.models.source import resolve_outline
from shared.options import SettingError
from shared.parent_watch import exit_with_parent as start_parent_watch
from shared.process_end import end_process
from shared.program_name import program_name

EXIT_BAD_SETTING = 2
EXIT_INTERRUPTED = 130


HELP = """Serve one model to OpenAI clients from nodes that hold its layers between them.

Two halves of a model of 24 layers, on one machine:

\b
  meshnet shard --model MODEL --layers 0:12  --listen 127.0.0.1:9001
  meshnet shard --model MODEL --layers 12:24 --listen 127.0.0.1:9002
  meshnet gateway --model MODEL --node ws://127.0.0.1:9001 --node ws://127.0.0.1:9002

Clients then use http://127.0.0.1:8000/v1 as their base_url. GET /readyz answers 200 once the nodes cover all
layers, and GET /mesh shows them. It ends with 0 when told to, with 2 when a setting is wrong.
"""


@click.command("gateway", help=HELP, context_settings={"show_default": True, "max_content_width": 110})
@gateway_options
def command(**options: Any) -> int:
    """Read settings, model and tokenizer, then serve. `HELP` is what people see."""
    if options["exit_with_parent"]:
        start_parent_watch()
    log_format = options["log_format"]
    configure_logging(level=options["log_level"], json=None if log_format == "auto" else log_format == "json")
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of what a gateway does on purpose
    settings = read_settings(options)
    folder = find_model(settings)
    tokenizer = read_tokenizer(settings, folder)
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        raise SettingError("--port", f"{settings.host}:{settings.port}: {error.strerror or error}") from error
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(serve(settings, folder, tokenizer, listener))
    return 0


def find_model(settings: GatewaySettings) -> ModelFolder:
    """The model's folder, converted with progress shown if need be; of a hub model no weights are fetched.

    Raises:
        SettingError: There is no such model, or it cannot be had.
    """
    try:
        with open_display() as display:
            return resolve_outline(settings.model, cache_dir=settings.cache_dir, progress=display.show)
    except ModelUnavailable as error:
        raise SettingError("--model", error.message) from error


def own_names(asked: str, name: str) -> tuple[str, ...]:
    """Names of a model that was given none: its own, and the catalogue's name by which it was asked for."""
    return tuple(dict.fromkeys((name, *([asked] if find_entry(asked) else []))))


def read_tokenizer(settings: GatewaySettings, folder: ModelFolder) -> ChatTokenizer:
    """The model's tokenizer.

    Raises:
        SettingError: It cannot be used.
    """
    try:
        return load_tokenizer(folder.path, context_len=settings.context_len, parsers=settings.parsers)
    except (TokenizerError, ModelUnavailable) as error:
        raise SettingError("--model", error.message) from error


async def serve(
    settings: GatewaySettings, folder: ModelFolder, tokenizer: ChatTokenizer, listener: socket.socket
) -> None:
    """Run the gateway until it is told to end: first HTTP drains, then the links close."""
    clock = SystemClock()
    gateway_id = f"gateway-{socket.gethostname()[:32]}-{uuid.uuid4().hex[:6]}"
    mesh = create_mesh(
        settings.nodes, gateway_id=gateway_id, model=folder.fingerprint, dial=dialling(settings.access), clock=clock
    )
    config = read_config(folder.path)
    generator = create_generator(
        mesh,
        model=folder.fingerprint,
        num_layers=config.num_layers,
        encode_text=tokenizer.encode_text,
        settings=settings.generation,
        clock=clock,
        vocab_size=config.vocab_size or None,
    )
    fleet_model = FleetModel(
        fingerprint=folder.fingerprint,
        name=folder.name,
        num_layers=config.num_layers,
        files=f"{MODEL_FILES_PATH}/{folder.fingerprint}" if folder.is_whole else None,
    )
    fleet = create_fleet(generator, fleet_model, folder.path, settings.fleet)
    state = GatewayState(
        model=ServedModel(
            names=settings.served_names or own_names(settings.model, folder.name),
            fingerprint=folder.fingerprint,
            created=int(time.time()),
        ),
        tokenizer=tokenizer,
        generator=generator,
        mesh=MeshView(mesh, generator, clock=clock, fleet=fleet),
        model_files=ModelFiles(folder, settings.access.tokens) if folder.is_whole else None,
        api_keys=settings.api_keys,
        mesh_tokens=settings.access.tokens,
        drainer=create_drainer(fleet, generator),
        cors_origins=settings.cors_origins,
        body_bytes_max=settings.body_bytes_max,
        stream_limits=settings.stream_limits,
        clock=clock,
    )
    joins = Joins(mesh, gateway_id=gateway_id, model=folder.fingerprint, access=settings.access, clock=clock)
    links = LinkListener(joins, clock=clock)
    context = settings.access.listen_context
    server = create_server(create_app(state), drain_s=settings.drain_s, links=links, context=context)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(part.run()) for part in (mesh, joins, fleet)]
        click.echo(f"listening on {http_url(listener, is_secure=context is not None)}")
        with ended_by_signals(server):
            await server.serve(sockets=[listener])
        await links.close()
        for task in running:
            task.cancel()


def main() -> int:
    """Run the command; what is wrong with a setting is one line that names it."""
    try:
        return int(command.main(prog_name=program_name("gateway", os.environ), standalone_mode=False) or 0)
    except click.UsageError as error:
        return _refuse(error.format_message())
    except SettingError as error:
        return _refuse(str(error))
    except click.Abort:
        return EXIT_INTERRUPTED


def _refuse(reason: str) -> int:
    click.echo(f"error: {' '.join(reason.split())}", err=True)
    return EXIT_BAD_SETTING


if __name__ == "__main__":
    end_process(main())
