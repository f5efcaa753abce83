"""``GET /mesh``: nodes and links, with the figures that operators and tests look at; taking a node out of service."""

from __future__ import annotations

from litestar import Request, Response, get, post
from litestar.datastructures import State
from litestar.params import FromPath

from gateway.client_watch import run_for_client
from gateway.fleet.drain import DrainRefused
from gateway.openai_errors import ApiError, json_bytes
from gateway.state import GatewayState

_STATUS = {"unknown_node": 404, "already_draining": 409, "no_replacement": 409}


@get("/mesh")
async def get_mesh(request: Request[None, None, State]) -> Response[bytes]:
    """The mesh as the gateway sees it now."""
    gateway: GatewayState = request.app.state.gateway
    await gateway.mesh.refresh()
    return Response(json_bytes(gateway.mesh.snapshot()), media_type="application/json")


@post("/mesh/nodes/{node:str}/drain", status_code=200)
async def drain_node(request: Request[None, None, State], node: FromPath[str]) -> Response[bytes]:
    """Take a node out of service; answers once it is gone. A caller who leaves takes the wish back."""
    gateway: GatewayState = request.app.state.gateway
    if gateway.drainer is None:
        raise ApiError(404, "This gateway has no fleet.", code="unknown_url")
    try:
        await request.body()
        drained = await run_for_client(request.receive, gateway.drainer.drain(node))
    except DrainRefused as refused:
        raise ApiError(_STATUS[refused.code], f"{refused.message}.", code=refused.code) from refused
    answer = {
        "node": drained.node,
        "sessions_left": drained.sessions_left,
        "is_gone": drained.is_gone,
        "took_s": round(drained.took_s, 3),
    }
    return Response(json_bytes(answer), media_type="application/json")
