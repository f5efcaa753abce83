"""``GET /healthz`` and ``GET /readyz``, for probes."""

from __future__ import annotations

from litestar import Request, Response, get
from litestar.datastructures import State

from gateway.openai_errors import not_ready
from gateway.state import GatewayState


@get("/healthz")
async def healthz() -> Response[bytes]:
    """200 while the process serves HTTP."""
    return Response(b'{"status":"ok"}', media_type="application/json")


@get("/readyz")
async def readyz(request: Request[None, None, State]) -> Response[bytes]:
    """200 only while a full route exists."""
    gateway: GatewayState = request.app.state.gateway
    missing = gateway.mesh.missing_route()
    if missing is not None:
        raise not_ready(f"The mesh cannot serve yet: {missing}")
    return Response(b'{"status":"ready"}', media_type="application/json")
