"""``GET /version``."""

from __future__ import annotations

from litestar import Response, get

from gateway.openai_errors import json_bytes
from shared.version import VERSION


@get("/version")
async def get_version() -> Response[bytes]:
    """This software's own."""
    return Response(json_bytes({"version": VERSION}), media_type="application/json")
