"""The bandwidth of a real link: a node joins through a proxy that lets so many bytes through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from websockets.asyncio.server import ServerConnection, serve

from gateway.joins import Joins
from gateway.mesh import Mesh
from shared.clock import SystemClock
from shared.errors import MeshError
from shared.link import WebSocketTransport
from shared.mesh_access import MeshAccess
from shared.websocket import listen_options
from tests.support.flexible_node import FakeLoader, joining_node
from tests.support.link_proxy import LinkProxy

WAIT_S = 20.0


@asynccontextmanager
async def accepting_mesh() -> AsyncIterator[tuple[Mesh, int]]:
    """A gateway's mesh that nodes join, and its port."""
    mesh, clock = Mesh(), SystemClock()
    joins = Joins(mesh, gateway_id="gateway", model=None, access=MeshAccess(), clock=clock)

    async def handle(connection: ServerConnection) -> None:
        with suppress(MeshError):
            welcomed = await joins.welcome(WebSocketTransport(connection), "127.0.0.1", has_certificate=False)
            await joins.serve(*welcomed)

    async with serve(handle, "127.0.0.1", 0, **listen_options()) as server:
        yield mesh, next(iter(server.sockets)).getsockname()[1]


async def until(condition: Callable[[], bool]) -> None:
    """Poll."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("bytes_per_s", "delay_s"), [(300_000.0, 0.0), (300_000.0, 0.02), (6_000_000.0, 0.0)], ids=str)
async def test_what_is_measured_is_what_the_link_lets_through(bytes_per_s: float, delay_s: float) -> None:
    """Within 30 %, whatever the round trip."""
    async with accepting_mesh() as (mesh, port), LinkProxy(port).run() as proxy:
        proxy.bytes_per_s = {"there": bytes_per_s, "back": bytes_per_s}
        proxy.delay_s = {"there": delay_s, "back": delay_s}
        async with joining_node([f"{proxy.url}/mesh"], FakeLoader()):
            await until(lambda: bool(mesh.links) and mesh.links[0].bytes_per_s is not None)
        assert mesh.links[0].bytes_per_s == pytest.approx(bytes_per_s, rel=0.3)
