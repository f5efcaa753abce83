"""uvicorn, set up for streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from litestar import Litestar

IDLE_CONNECTION_S = 75
"""How long an idle connection is kept: longer than SDKs keep theirs, so that they close first."""
BACKLOG = 1024


class GatewayServer(uvicorn.Server):
    """A server that leaves signals to whoever runs it; set `should_exit` to end it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: uvicorn would end the process by the signal, before anything else is closed."""
        yield


def create_server(app: Litestar, *, drain_s: float, host: str = "127.0.0.1", port: int = 0) -> GatewayServer:
    """A server for the application; `serve` runs it.

    Args:
        app: What it serves.
        drain_s: How long calls may go on once it is told to end.
        host: Address to listen on.
        port: 0 lets the kernel choose.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_CONNECTION_S,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    return GatewayServer(config)
