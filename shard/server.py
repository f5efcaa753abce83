"""The node's listening side: WebSocket links and two HTTP questions on one port."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from http import HTTPStatus

import orjson
import structlog
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from shard.peer import Peer
from shard.service import NodeService
from shared.clock import Clock
from shared.errors import MeshError
from shared.frame import DEFAULT_LIMITS, PROTOCOL_VERSION, FrameLimits
from shared.handshake import VERSIONS, choose_version
from shared.link import WebSocketTransport, accept
from shared.mesh_access import MeshAccess
from shared.messages import Hello, Refused, Welcome
from shared.version import SOFTWARE
from shared.websocket import listen_options

PEERS_MAX = 64
"""Gateways, and nodes that push to this one; each may hold a few frames in memory."""
HTTP_OPEN_TIMEOUT_S = 5.0
"""From the TCP connection to the end of its HTTP request; then it is closed."""

log = structlog.stdlib.get_logger(__name__)


class NodeServer:
    """Accepts links for a service.

    Args:
        service: Acts on what comes.
        access: Tokens and TLS.
        clock: Monotonic time.
        limits: What is read of a frame.
    """

    def __init__(
        self, *, service: NodeService, access: MeshAccess, clock: Clock, limits: FrameLimits = DEFAULT_LIMITS
    ) -> None:
        self._service = service
        self._access = access
        self._clock = clock
        self._limits = limits

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[tuple[Server, int]]:
        """Listen; gives the server and the port it got. Leaving closes every link.

        Raises:
            OSError: The address cannot be listened on.
        """
        server = await serve(
            self._serve_link,
            host,
            port,
            process_request=self._answer_http,
            open_timeout=HTTP_OPEN_TIMEOUT_S,
            server_header=None,
            ssl=self._access.listen_context,
            **listen_options(self._limits),
        )
        try:
            yield server, next(iter(server.sockets)).getsockname()[1]
        finally:
            server.close()
            await server.wait_closed()

    def _answer_http(self, connection: ServerConnection, request: Request) -> Response | None:
        path = request.path.partition("?")[0]
        state = self._service.state
        if path == "/healthz":
            return self._json_response(HTTPStatus.SERVICE_UNAVAILABLE if state == "failed" else HTTPStatus.OK)
        if path == "/readyz":
            return self._json_response(HTTPStatus.OK if state == "ready" else HTTPStatus.SERVICE_UNAVAILABLE)
        if "Upgrade" not in request.headers:
            return connection.respond(HTTPStatus.NOT_FOUND, "a meshnet node: WebSocket links, /healthz, /readyz\n")
        return None

    def _json_response(self, status: HTTPStatus) -> Response:
        service = self._service
        layers = str(service.info.layers) if service.info else None
        body = orjson.dumps({"state": service.state, "node": service.node_id, "layers": layers})
        headers = Headers({"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"})
        return Response(status.value, status.phrase, headers, body)

    def _answer_hello(self, hello: Hello, *, has_certificate: bool) -> Welcome | Refused:
        info = self._service.info
        model = info.model if info and not self._service.machine else None  # one that takes any range takes any model
        if refusal := self._access.check(hello, has_certificate=has_certificate, model=model):
            return refusal
        if self._service.state == "draining":
            return Refused(code="draining", message="the node is leaving")
        if len(self._service.peers) >= PEERS_MAX:
            return Refused(code="too_many_links", message=f"the limit is {PEERS_MAX} links")
        version = choose_version(hello.versions, VERSIONS) or PROTOCOL_VERSION
        machine = self._service.machine
        return Welcome(version=version, peer=self._service.node_id, node=info, machine=machine, software=SOFTWARE)

    async def _serve_link(self, connection: ServerConnection) -> None:
        try:
            transport = WebSocketTransport(connection)
            answer = partial(self._answer_hello, has_certificate=transport.has_certificate)
            link = await accept(transport, answer=answer, limits=self._limits)
        except MeshError as error:
            log.warning("peer.refused", code=error.code, reason=error.message, address=connection.remote_address)
            return
        peer = Peer(link, handle=self._service.handle, clock=self._clock)
        log.info("peer.connected", peer=peer.name, role=link.hello.role, software=link.hello.software)
        try:
            await self._service.serve(peer, described=link.welcome.node)
        except MeshError as reason:
            log.info("peer.closed", peer=peer.name, code=reason.code)
