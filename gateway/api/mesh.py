"""``GET /mesh``: nodes and links, with the figures that operators and tests look at."""

from __future__ import annotations

from litestar import Request, Response, get
from litestar.datastructures import State

from gateway.openai_errors import json_bytes
from gateway.state import GatewayState


@get("/mesh")
async def get_mesh(request: Request[None, None, State]) -> Response[bytes]:
    """The mesh as the gateway sees it now."""
    gateway: GatewayState = request.app.state.gateway
    await gateway.mesh.refresh()
    return Response(json_bytes(gateway.mesh.snapshot()), media_type="application/json")
