"""What a gateway is told at its start, and what is wrong with it. Read from flags by `gateway.options`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gateway.fleet.settings import FleetSettings
from gateway.generation import GenerationSettings
from gateway.parser_choice import ParserNames
from gateway.response_writer import StreamLimits
from shared.mesh_access import MeshAccess
from shared.options import SettingError

_NODE_URL = re.compile(r"(?:wss?|https?)://[^/\s]+(/\S*)?")
_HOST_PORT = re.compile(r"([^/:\s]+|\[[0-9a-fA-F:]+\]):\d{1,5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Everything that a flag or a variable sets.

    Args:
        model: Folder, file, hub id or catalogue name.
        cache_dir: Where fetched and converted models are kept; None for the platform's folder.
        served_names: Names under which callers ask for the model; empty for its own.
        context_len: Overrides the window that the model's config names.
        nodes: Addresses of nodes that are dialled; others join.
        access: Tokens and TLS: what the gateway shows to nodes, and asks for.
        host: Address to listen on.
        port: 0 lets the kernel choose.
        api_keys: What callers present; empty admits all.
        cors_origins: Web pages that may call; empty as `gateway.cors` says.
        insecure: Listen beyond loopback without an API key and a mesh token.
        body_bytes_max: The largest request body.
        stream_limits: How long a stream may be silent.
        generation: Bounds of generations.
        fleet: What nodes are given their ranges for.
        drain_s: How long calls may go on once the gateway was asked to end.
    """

    model: str
    cache_dir: Path | None
    served_names: tuple[str, ...]
    context_len: int | None
    parsers: ParserNames
    nodes: tuple[str, ...]
    access: MeshAccess
    host: str
    port: int
    api_keys: tuple[str, ...]
    cors_origins: tuple[str, ...]
    insecure: bool
    body_bytes_max: int
    stream_limits: StreamLimits
    generation: GenerationSettings
    fleet: FleetSettings
    drain_s: float

    def check(self) -> None:
        """Check what no single flag can tell.

        Raises:
            SettingError: Listening beyond loopback for everyone.
        """
        if self.insecure or is_loopback(self.host):
            return
        absent = [
            flag
            for flag, is_given in (("--api-key", self.api_keys), ("--mesh-token", self.access.has_token))
            if not is_given
        ]
        if absent:
            raise SettingError(
                "--host",
                f"{self.host} is beyond this machine, where anyone could use the mesh: "
                f"give {' and '.join(absent)}, or --insecure if that is meant",
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_node_url(text: str) -> str:
    """Read a node's address: ``ws://host:9001``, ``wss://host/path``, ``http://host:9001``, or ``host:9001``.

    Raises:
        ValueError: If it is none of these.
    """
    if _NODE_URL.fullmatch(text) and _can_be_dialled(text):
        return text
    if _HOST_PORT.fullmatch(text) and _can_be_dialled(f"ws://{text}"):
        return f"ws://{text}"
    raise ValueError(f"must look like ws://127.0.0.1:9001 or 127.0.0.1:9001, got {text!r}")


def _can_be_dialled(url: str) -> bool:
    """Whether host and port are such that a socket would at least look for them."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        return bool(host) and port != 0 and bool(str(host).encode("idna"))
    except ValueError:  # of which a UnicodeError is one
        return False
