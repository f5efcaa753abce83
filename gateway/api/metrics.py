"""``GET /metrics``: the mesh's figures for Prometheus."""

from __future__ import annotations

from litestar import Request, Response, get
from litestar.datastructures import State

from gateway.metrics import CONTENT_TYPE, metrics_text
from gateway.state import GatewayState


@get("/metrics")
async def get_metrics(request: Request[None, None, State]) -> Response[bytes]:
    """What ``GET /mesh`` says, as numbers with names."""
    gateway: GatewayState = request.app.state.gateway
    await gateway.mesh.refresh()
    text = metrics_text(gateway.mesh.snapshot())
    return Response(text.encode(), media_type=CONTENT_TYPE)
