"""WebSocket links on the port that HTTP is served on.

uvicorn reads the head of a request; one that asks to become a WebSocket at `LINK_PATH` is handed, transport and all, to
a connection of the `websockets` library: the very one that listens on a node. So a link that was accepted costs what a
dialled one costs, frame by frame, has the same limits before and after the token, and nothing of ASGI is in its way.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

import structlog
from websockets.asyncio.server import Server, ServerConnection
from websockets.protocol import State
from websockets.server import ServerProtocol

from gateway.join_rules import JoinGate
from gateway.joins import Joins
from gateway.openai_errors import ApiError
from shared.clock import Clock
from shared.errors import MeshError
from shared.link import Link
from shared.websocket import WebSocketTransport, listen_options

LINK_PATH: Final = b"/mesh"
"""Where a node dials; a plain GET shows the mesh."""
STOP_S = 2.0
"""How long links may take to be closed when the gateway ends."""

log = structlog.stdlib.get_logger(__name__)


class LinkListener:
    """Takes connections over from HTTP. Also the part of a `websockets` server that its connections ask for.

    Args:
        joins: Decides who is welcome, and serves them.
        clock: Time.
    """

    def __init__(self, joins: Joins, *, clock: Clock) -> None:
        self.handler_tasks: set[asyncio.Task[None]] = set()
        self._joins = joins
        self._clock = clock
        self._gate = JoinGate()
        self._is_closed = False

    def is_serving(self) -> bool:
        """Whether new links are taken."""
        return not self._is_closed

    def refusal(self, host: str) -> ApiError | None:
        """Why a connection from there may not become a link; one that may is given to `take` at once."""
        if self._is_closed:
            return ApiError(503, "This gateway is ending.", kind="server_error", code="draining")
        return self._gate.enter(host, self._clock.monotonic())

    def take(self, transport: asyncio.Transport, received: bytes) -> None:
        """Go on with a connection.

        Args:
            transport: Its protocol becomes the link's.
            received: What has come so far: the head of the request that asks for a WebSocket, and what followed it.
        """
        options: dict[str, Any] = listen_options()
        for unused in ("compression", "origins", "max_size"):
            options.pop(unused)
        protocol = ServerProtocol(origins=[None], max_size=listen_options()["max_size"])
        connection = ServerConnection(protocol, cast("Server", self), **options)
        transport.set_protocol(connection)
        connection.connection_made(transport)
        connection.data_received(received)

    async def handler(self, connection: ServerConnection) -> None:
        """Serve one connection; called by it, in a task that is in `handler_tasks`."""
        try:
            opened = await self._open(connection)
            if opened is not None:
                await self._joins.serve(*opened)
        except MeshError as error:
            log.info("join.ended", code=error.code, reason=error.message, address=connection.remote_address)
        except Exception:
            log.exception("join.failed", address=connection.remote_address)
        finally:
            connection.transport.close()
            task = asyncio.current_task()
            if task is not None:
                self.handler_tasks.discard(task)

    async def close(self) -> None:
        """Take no more links, and close those that are open."""
        self._is_closed = True
        tasks = list(self.handler_tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)

    async def _open(self, connection: ServerConnection) -> tuple[Link, str] | None:
        try:
            await connection.handshake(server_header=None)
            if connection.protocol.state is not State.OPEN:  # it was no such request, and has been told so
                return None
            transport = WebSocketTransport(connection)
            host = _host_of(connection)
            return await self._joins.welcome(transport, host, has_certificate=transport.has_certificate)
        except MeshError as error:
            log.warning("join.refused", code=error.code, reason=error.message, address=connection.remote_address)
            return None
        finally:
            self._gate.leave()


def _host_of(connection: ServerConnection) -> str:
    address = connection.remote_address
    return str(address[0]) if address else ""
