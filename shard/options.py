"""The node's flags and variables, as click options."""

from __future__ import annotations

import socket
import uuid
from typing import Any

import click

from shard.machine import physical_cores
from shard.settings import Address, KvLimits, NodeSettings, parse_join_url, parse_node_id
from shared.layers import LayerRange
from shared.mesh_options import mesh_options, read_mesh_access
from shared.options import (
    THREADS_MAX,
    Parsed,
    add_options,
    cache_dir_option,
    drain_option,
    dtype_option,
    exit_with_parent_option,
    log_options,
    option,
    parse_bytes,
    quantize_option,
)

_SESSIONS_MAX = 100_000
DEFAULT_LISTEN = "127.0.0.1:9001"

_MODEL = (
    option(
        "--model",
        "MODEL",
        "A Hugging Face folder, a .gguf file, a hub id such as owner/name, or a catalogue name. Without --layers: what "
        "this machine may have of the model that a gateway names.",
        metavar="MODEL",
        show_default="must be given with --layers",
    ),
    option(
        "--layers",
        "LAYERS",
        "The decoder layers to hold: START is the first, END the one after the last.",
        metavar="START:END",
        show_default="what a gateway gives it; must be given without --join",
        type=Parsed("range", LayerRange.parse),
    ),
    option(
        "--trust-remote-code",
        "TRUST_REMOTE_CODE",
        "Run the Python code that a model brings beside its weights (config.json's auto_map), with all that this "
        "process may do. Without it such a model is refused.",
        is_flag=True,
    ),
    cache_dir_option,
)

_PLACE = (
    option(
        "--join",
        "JOIN",
        "A gateway to dial, through NAT and proxies, with /mesh at the end or without; may be given several times. "
        "Each is dialled again for ever.",
        multiple=True,
        metavar="ws://HOST:PORT",
        type=Parsed("address", parse_join_url),
    ),
    option(
        "--listen",
        "LISTEN",
        "Where gateways dial this node. Port 0 lets the system choose; the address is printed.",
        metavar="HOST:PORT",
        type=Parsed("address", Address.parse),
        show_default=f"{DEFAULT_LISTEN}; nowhere with --join",
    ),
    option(
        "--node-id",
        "NODE_ID",
        "Its name, unique in the mesh.",
        metavar="ID",
        type=Parsed("id", parse_node_id),
        show_default="host, range and a random part; with --join host and a random part that stays",
    ),
    *mesh_options,
    option("--insecure", "INSECURE", "Listen beyond this machine without a mesh token.", is_flag=True),
)

_COMPUTE = (
    option(
        "--device",
        "DEVICE",
        "cpu, cuda, cuda:1 or mps; auto takes a CUDA device if there is one, else the CPU.",
        default="auto",
        metavar="DEVICE",
    ),
    dtype_option,
    quantize_option,
    option(
        "--threads",
        "THREADS",
        "Threads that compute. Give each of several nodes on one machine its share.",
        default=physical_cores,
        type=click.IntRange(1, THREADS_MAX),
        show_default="the number of physical cores",
    ),
)

_MEMORY = (
    option(
        "--memory",
        "MEMORY",
        "All that this process may use where a gateway gives it its layers, such as 4G: weights, caches and torch.",
        metavar="BYTES",
        type=Parsed("bytes", parse_bytes),
        show_default="nine tenths of what is free",
    ),
)

_KV = (
    option(
        "--kv-ttl-seconds",
        "KV_TTL_SECONDS",
        "A session that no step touches for so long is freed.",
        default=600.0,
        type=click.FloatRange(min=0, min_open=True),
    ),
    option(
        "--kv-max-sessions",
        "KV_MAX_SESSIONS",
        "Sessions held at once; the least recently used goes first.",
        default=8,
        type=click.IntRange(1, _SESSIONS_MAX),
    ),
    option(
        "--kv-max-bytes",
        "KV_MAX_BYTES",
        "Memory for the caches of all sessions, such as 512M or 2G.",
        metavar="BYTES",
        type=Parsed("bytes", parse_bytes),
        show_default="a quarter of what is free once the weights are loaded; what --memory leaves with --join alone",
    ),
    option(
        "--kv-cache/--no-kv-cache",
        "KV_CACHE",
        "Keep sessions. Without, every step is a prefill: slow, and nothing is held between steps.",
        default=True,
    ),
)

_PROCESS = (drain_option("open sessions"), exit_with_parent_option, *log_options)


def node_options(function: Any) -> Any:
    """Add every flag of a node to a click command."""
    return add_options(function, (*_MODEL, *_PLACE, *_COMPUTE, *_MEMORY, *_KV, *_PROCESS))


def read_settings(options: dict[str, Any]) -> NodeSettings:
    """The parsed options as settings.

    Raises:
        SettingError: They do not go together.
    """
    layers: LayerRange | None = options["layers"]
    joins = tuple(dict.fromkeys(options["join"]))
    settings = NodeSettings(
        model=options["model"],
        layers=layers,
        joins=joins,
        listen=options["listen"] or (None if joins else Address.parse(DEFAULT_LISTEN)),
        node_id=options["node_id"] or (default_node_id(layers) if layers and not joins else None),
        device=options["device"],
        dtype=options["dtype"],
        trust_remote_code=options["trust_remote_code"],
        quantize=options["quantize"],
        threads=options["threads"],
        access=read_mesh_access(options),
        insecure=options["insecure"],
        kv=KvLimits(
            enabled=options["kv_cache"],
            ttl_s=options["kv_ttl_seconds"],
            sessions_max=options["kv_max_sessions"],
            bytes_max=options["kv_max_bytes"],
        ),
        memory_bytes=options["memory"],
        drain_s=options["drain_seconds"],
    )
    settings.check()
    return settings


def default_node_id(layers: LayerRange) -> str:
    """A name that says where the node is and what it holds, and is unique."""
    return f"{socket.gethostname()[:32]}-{layers.start}-{layers.end}-{uuid.uuid4().hex[:6]}"
