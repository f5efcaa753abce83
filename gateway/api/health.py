"""Probes: ``GET /healthz`` for the process, ``GET /readyz`` and its other names for the mesh."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get, post
from litestar.datastructures import State

from gateway.openai_errors import json_bytes, not_ready
from gateway.state import GatewayState


@get("/healthz")
async def healthz() -> Response[bytes]:
    """200 while the process serves HTTP."""
    return Response(b'{"status":"ok"}', media_type="application/json")


@get(["/readyz", "/health", "/ping"])
async def readyz(request: Request[None, None, State]) -> Response[bytes]:
    """200 only while a full route exists."""
    return _readiness(request)


@post("/ping", status_code=200)
async def post_ping(request: Request[None, None, State]) -> Response[bytes]:
    """The same, for platforms that probe with a POST."""
    return _readiness(request)


def _readiness(request: Request[None, None, State]) -> Response[bytes]:
    gateway: GatewayState = request.app.state.gateway
    readiness = gateway.mesh.readiness()
    reason = readiness.pop("reason")
    if reason is None:
        return _json({"status": "ready", **readiness})
    error = not_ready(f"The mesh cannot serve yet: {reason}")
    return _json({"error": error.fields(), **readiness}, status_code=error.status, headers=error.headers)


def _json(content: dict[str, object], **settings: Any) -> Response[bytes]:
    return Response(json_bytes(content), media_type="application/json", **settings)
