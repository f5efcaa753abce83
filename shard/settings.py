"""What a node is told at its start, and what is wrong with it. Read from flags by `shard.__main__`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from shared.layers import LayerRange
from shared.mesh_access import MeshAccess
from shared.options import PORT_MAX, SettingError

NODE_ID_CHARS_MAX = 64
"""What a message's name field holds."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a node listens; port 0 lets the kernel choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``127.0.0.1:9001``, ``[::1]:9001`` or ``host:0``.

        Raises:
            ValueError: If it is no host and port.
        """
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        bare = host[1:-1] if bracketed else host
        if not colon or not bare or (":" in bare) != bracketed:
            raise ValueError(f"must look like 127.0.0.1:9001 or [::1]:9001, got {text!r}")
        if not port.isdecimal() or int(port) > PORT_MAX:
            raise ValueError(f"the port must be from 0 to {PORT_MAX}, got {port!r}")
        return cls(bare, int(port))


@dataclass(frozen=True, slots=True)
class KvLimits:
    """What the node keeps of sessions.

    Args:
        enabled: False serves every step without keeping anything.
        ttl_s: Seconds after which an untouched session is gone.
        sessions_max: How many sessions at once.
        bytes_max: Byte budget; None takes a share of what is free after loading.
    """

    enabled: bool = True
    ttl_s: float = 600.0
    sessions_max: int = 8
    bytes_max: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Everything that a flag or a variable sets.

    Args:
        model: Folder, file, hub id or catalogue name; for a node that takes any range it may be None.
        layers: The range to hold; None takes what a gateway gives.
        joins: Gateways to dial.
        listen: Where to listen; None joins only.
        node_id: Unique in the mesh; None takes the one that this machine has for it (`shard.identity`).
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        trust_remote_code: Run the code that a model brings, where it brings any.
        quantize: ``none``, ``int8`` or ``int4``.
        threads: Threads of the compute thread's operators.
        access: Tokens and TLS: what peers must show, and what the node shows.
        insecure: Listen beyond loopback without a token.
        kv: What is kept of sessions.
        memory_bytes: All that the process may use, for a node that takes any range; None measures.
        drain_s: How long sessions may go on once the node was asked to end.
    """

    model: str | None
    layers: LayerRange | None
    joins: tuple[str, ...] = ()
    listen: Address | None
    node_id: str | None
    device: str
    dtype: str
    quantize: str
    threads: int
    access: MeshAccess
    insecure: bool
    kv: KvLimits
    memory_bytes: int | None = None
    trust_remote_code: bool = False
    drain_s: float

    def check(self) -> None:
        """Check what no single flag can tell.

        Raises:
            SettingError: Listening beyond loopback for everyone; a flag without the one that it needs.
        """
        if self.layers is None and not self.joins:
            raise SettingError("--layers", "give the range, or --join to be given one by a gateway")
        if self.layers is not None and self.model is None:
            raise SettingError("--model", f"is missing: of which model shall layers {self.layers} be?")
        if self.layers is not None and self.memory_bytes is not None:
            raise SettingError("--memory", "is for a node that is given its layers by a gateway: leave --layers out")
        if self.listen is None:
            return
        if not self.listen.is_loopback and not self.access.has_token and not self.insecure:
            raise SettingError(
                "--listen",
                f"{self.listen} is beyond this machine, where anyone could use the node: "
                "give --mesh-token, or --insecure if that is meant",
            )


def check_layers(layers: LayerRange, num_layers: int) -> None:
    """Check the range against the model.

    Raises:
        SettingError: The model has fewer layers.
    """
    if layers.end > num_layers:
        raise SettingError("--layers", f"{layers} ends after the model's last layer: it has {num_layers}")


def parse_join_url(text: str) -> str:
    """Read the address of a gateway to join; without a path it is ``/mesh``.

    Raises:
        ValueError: If it is no ``ws://`` or ``wss://`` address.
    """
    parts = urlsplit(text)
    if parts.scheme not in ("ws", "wss") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ValueError(f"must look like ws://host:8000/mesh or wss://host/mesh, got {text!r}")
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"the port must be from 0 to {PORT_MAX}, got {text!r}") from error
    return text if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/mesh"


def parse_node_id(text: str) -> str:
    """Read a node's id.

    Raises:
        ValueError: If it is empty, too long, or would not print.
    """
    if not 1 <= len(text) <= NODE_ID_CHARS_MAX or not text.isprintable():
        raise ValueError(f"must be 1 to {NODE_ID_CHARS_MAX} printable characters")
    return text
