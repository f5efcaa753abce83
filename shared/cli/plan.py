"""What `meshnet up` decides before it starts anything: ranges, threads, commands. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.layers import LayerRange
from shared.options import SettingError
from shared.websocket import is_loopback

API_KEYS_VARIABLE = "MESHNET_API_KEYS"
MESH_TOKEN_VARIABLE = "MESHNET_MESH_TOKEN"  # noqa: S105 - its name


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """What a user asked for.

    Args:
        model: Folder, file, hub id or catalogue name.
        nodes: How many nodes share the model.
        host: Where the gateway listens.
        port: Its port.
        threads: Compute threads of each node; None divides the machine's cores.
        dtype: As the node's flag.
        quantize: As the node's flag.
        device: As the node's flag.
        cache_dir: Where models are kept; None is the platform's cache folder.
        log_level: Of every process.
        log_format: Of every process: ``text`` or ``json``.
        insecure: Let the gateway listen beyond this machine without keys.
        api_keys: Keys of which clients must present one; the gateway reads them from the same variable.
    """

    model: str
    nodes: int
    host: str
    port: int
    threads: int | None
    dtype: str
    quantize: str
    device: str
    cache_dir: Path | None
    log_level: str
    log_format: str
    insecure: bool
    api_keys: tuple[str, ...] = field(default=(), repr=False)

    @property
    def api_key(self) -> str | None:
        """The key that we present ourselves."""
        return next(iter(self.api_keys), None)

    @property
    def base_url(self) -> str:
        """Where a client on this machine reaches the gateway."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)  # noqa: S104 - compared, not bound
        return f"http://{f'[{host}]' if ':' in host and '[' not in host else host}:{self.port}"


def split_api_keys(variable: str) -> tuple[str, ...]:
    """The keys in `API_KEYS_VARIABLE`, apart by commas or spaces as the gateway reads them."""
    return tuple(variable.replace(",", " ").split())


def check_exposure(settings: UpSettings, *, has_mesh_token: bool) -> None:
    """Refuse at once what the gateway would refuse once everything else has been started.

    Raises:
        SettingError: Listening beyond this machine for everyone.
    """
    host = f"[{settings.host}]" if ":" in settings.host and "[" not in settings.host else settings.host
    if settings.insecure or is_loopback(f"ws://{host}"):
        return
    absent = [
        name
        for name, is_given in ((API_KEYS_VARIABLE, settings.api_keys), (MESH_TOKEN_VARIABLE, has_mesh_token))
        if not is_given
    ]
    if absent:
        raise SettingError(
            "--host",
            f"{settings.host} is beyond this machine, where anyone could use the mesh: "
            f"set {' and '.join(absent)}, or give --insecure if that is meant",
        )


def threads_per_node(cores: int, nodes: int) -> int:
    """Each node's share of the cores, at least one."""
    return max(1, cores // nodes)


def node_command(
    settings: UpSettings, index: int, layers: LayerRange, threads: int, listen: str = "127.0.0.1:0"
) -> list[str]:
    """How the node of this index is started; the kernel chooses its port unless it had one before."""
    return [
        *(sys.executable, "-m", "shard"),
        *("--model", settings.model),
        *("--layers", str(layers)),
        *("--listen", listen),
        *("--node-id", f"node-{index}"),
        *("--device", settings.device),
        *("--dtype", settings.dtype),
        *("--quantize", settings.quantize),
        *("--threads", str(threads)),
        *_common_flags(settings),
    ]


def gateway_command(settings: UpSettings, node_urls: Sequence[str]) -> list[str]:
    """How the gateway is started."""
    return [
        *(sys.executable, "-m", "gateway"),
        *("--model", settings.model),
        *("--host", settings.host),
        *("--port", str(settings.port)),
        *(flag for url in node_urls for flag in ("--node", url)),
        *(["--insecure"] if settings.insecure else []),
        *_common_flags(settings),
    ]


def _common_flags(settings: UpSettings) -> list[str]:
    flags = ["--log-level", settings.log_level, "--log-format", settings.log_format, "--exit-with-parent"]
    return flags if settings.cache_dir is None else [*flags, "--cache-dir", str(settings.cache_dir)]
