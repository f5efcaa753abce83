"""uvicorn, set up for streams."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import uvicorn
from litestar import Litestar

from gateway.http_protocol import HttpLimits, create_protocol
from gateway.link_listener import LinkListener

IDLE_CONNECTION_S = 75
"""How long an idle connection is kept: longer than SDKs keep theirs, so that they close first."""
BACKLOG = 1024
CONNECTIONS_MAX = 4096
"""Each costs some 20 KB while it is idle, and its stream's buffers while it is not."""
FILES_RESERVED = 128
"""File descriptors that are kept for the nodes' links, for files, and for connections that are being refused."""

log = structlog.get_logger(__name__)


class GatewayServer(uvicorn.Server):
    """A server that leaves signals to whoever runs it; set `should_exit` to end it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: uvicorn would end the process by the signal, before anything else is closed."""
        yield


def connections_max() -> int:
    """How many connections this process has file descriptors for, up to `CONNECTIONS_MAX`."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return max(1, min(CONNECTIONS_MAX, files - FILES_RESERVED))


def create_server(
    app: Litestar,
    *,
    drain_s: float,
    limits: HttpLimits | None = None,
    links: LinkListener | None = None,
    context: ssl.SSLContext | None = None,
) -> GatewayServer:
    """A server for the application; `serve(sockets=[…])` runs it.

    Args:
        app: What it serves.
        drain_s: How long calls may go on once it is told to end.
        limits: What a connection may cost; None for the defaults.
        links: Takes the connections of nodes that join; None for none.
        context: TLS; None serves without.
    """
    config = uvicorn.Config(
        app,
        http=create_protocol(limits or HttpLimits(connections_max=connections_max()), links),
        ws="none",  # links are no ASGI sockets: see `gateway.link_listener`
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_CONNECTION_S,
        timeout_graceful_shutdown=math.ceil(drain_s),
        ssl_context_factory=None if context is None else lambda *_: context,
    )
    return GatewayServer(config)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        OSError: The address is unknown, or taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


def http_url(listener: socket.socket, *, is_secure: bool = False) -> str:
    """Where a listening socket is reached."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if is_secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


@contextmanager
def ended_by_signals(server: GatewayServer) -> Iterator[None]:
    """Within, the first SIGTERM or SIGINT lets the server drain and end; the second ends the process at once."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if server.should_exit:
            log.warning("gateway.killed", signal=signal.Signals(number).name)
            os._exit(128 + number)
        log.info("gateway.draining", signal=signal.Signals(number).name)
        server.should_exit = True

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
