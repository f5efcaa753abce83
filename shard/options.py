"""The node's flags and variables, as click options."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shard.machine import physical_cores
from shard.settings import Address, KvLimits, NodeSettings, parse_bytes, parse_node_id
from shared.layers import LayerRange

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_LOG_LEVELS = ("debug", "info", "warning", "error")
_THREADS_MAX = 1024
_SESSIONS_MAX = 100_000

Decorator = Callable[[Any], Any]


class Parsed(click.ParamType[Any]):
    """A value read by a function that raises `ValueError` saying what the text must look like."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the text; a default that is no text is taken as it is."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _option(flag: str, variable: str, help: str, **settings: Any) -> Decorator:  # noqa: A002 - click's word
    return click.option(flag, envvar=f"MESHNET_{variable}", show_envvar=True, help=help, **settings)


_MODEL = (
    _option(
        "--model",
        "MODEL",
        "A Hugging Face folder, a .gguf file, a hub id such as owner/name, or a catalogue name.",
        required=True,
        metavar="MODEL",
    ),
    _option(
        "--layers",
        "LAYERS",
        "The decoder layers to hold: START is the first, END the one after the last.",
        required=True,
        metavar="START:END",
        type=Parsed("range", LayerRange.parse),
    ),
    _option(
        "--cache-dir",
        "CACHE_DIR",
        "Where fetched and converted models are kept.",
        metavar="FOLDER",
        type=click.Path(file_okay=False, path_type=Path),
        show_default="the platform's cache folder",
    ),
)

_PLACE = (
    _option(
        "--listen",
        "LISTEN",
        "Where gateways dial this node. Port 0 lets the system choose; the address is printed.",
        default="127.0.0.1:9001",
        metavar="HOST:PORT",
        type=Parsed("address", Address.parse),
    ),
    _option(
        "--node-id",
        "NODE_ID",
        "Its name, unique in the mesh.",
        metavar="ID",
        type=Parsed("id", parse_node_id),
        show_default="host, range and a random part",
    ),
    _option(
        "--mesh-token",
        "MESH_TOKEN",
        "What peers must present. Prefer the variable: other users of the machine can read a command line.",
        metavar="TOKEN",
    ),
    _option("--insecure", "INSECURE", "Listen beyond this machine without a mesh token.", is_flag=True),
)

_COMPUTE = (
    _option(
        "--device",
        "DEVICE",
        "cpu, cuda, cuda:1 or mps; auto takes a CUDA device if there is one, else the CPU.",
        default="auto",
        metavar="DEVICE",
    ),
    _option(
        "--dtype",
        "DTYPE",
        "What weights are held and computed in; auto takes the checkpoint's own.",
        default="auto",
        type=click.Choice(_DTYPES),
    ),
    _option(
        "--threads",
        "THREADS",
        "Threads that compute. Give each of several nodes on one machine its share.",
        default=physical_cores,
        type=click.IntRange(1, _THREADS_MAX),
        show_default="the number of physical cores",
    ),
)

_KV = (
    _option(
        "--kv-ttl-seconds",
        "KV_TTL_SECONDS",
        "A session that no step touches for so long is freed.",
        default=600.0,
        type=click.FloatRange(min=0, min_open=True),
    ),
    _option(
        "--kv-max-sessions",
        "KV_MAX_SESSIONS",
        "Sessions held at once; the least recently used goes first.",
        default=8,
        type=click.IntRange(1, _SESSIONS_MAX),
    ),
    _option(
        "--kv-max-bytes",
        "KV_MAX_BYTES",
        "Memory for the caches of all sessions, such as 512M or 2G.",
        metavar="BYTES",
        type=Parsed("bytes", parse_bytes),
        show_default="a quarter of what is free once the weights are loaded",
    ),
    _option(
        "--kv-cache/--no-kv-cache",
        "KV_CACHE",
        "Keep sessions. Without, every step is a prefill: slow, and nothing is held between steps.",
        default=True,
    ),
)

_PROCESS = (
    _option(
        "--drain-seconds",
        "DRAIN_SECONDS",
        "How long open sessions may go on after SIGTERM or Ctrl-C; a second signal ends at once.",
        default=10.0,
        type=click.FloatRange(min=0),
    ),
    _option(
        "--exit-with-parent",
        "EXIT_WITH_PARENT",
        "End when the process that started this one is gone, also when it was killed.",
        is_flag=True,
    ),
    _option(
        "--log-level",
        "LOG_LEVEL",
        "Least severe events to log, on standard error.",
        default="info",
        type=click.Choice(_LOG_LEVELS),
    ),
    _option(
        "--log-format",
        "LOG_FORMAT",
        "auto is text on a terminal, JSON lines otherwise.",
        default="auto",
        type=click.Choice(["auto", "text", "json"]),
    ),
)


def node_options(function: Any) -> Any:
    """Add every flag of a node to a click command."""
    for add in reversed((*_MODEL, *_PLACE, *_COMPUTE, *_KV, *_PROCESS)):
        function = add(function)
    return function


def read_settings(options: dict[str, Any]) -> NodeSettings:
    """The parsed options as settings.

    Raises:
        SettingError: They do not go together.
    """
    layers: LayerRange = options["layers"]
    settings = NodeSettings(
        model=options["model"],
        layers=layers,
        listen=options["listen"],
        node_id=options["node_id"] or default_node_id(layers),
        device=options["device"],
        dtype=options["dtype"],
        threads=options["threads"],
        mesh_token=options["mesh_token"] or None,
        insecure=options["insecure"],
        kv=KvLimits(
            enabled=options["kv_cache"],
            ttl_s=options["kv_ttl_seconds"],
            sessions_max=options["kv_max_sessions"],
            bytes_max=options["kv_max_bytes"],
        ),
        drain_s=options["drain_seconds"],
    )
    settings.check()
    return settings


def default_node_id(layers: LayerRange) -> str:
    """A name that says where the node is and what it holds, and is unique."""
    return f"{socket.gethostname()[:32]}-{layers.start}-{layers.end}-{uuid.uuid4().hex[:6]}"
