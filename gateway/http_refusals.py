"""How a connection is refused that is no request yet: as bytes, and once in a while as a line in the log."""

from __future__ import annotations

import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.openai_errors import RETRY_AFTER_S, ApiError, retry_after

LOGGED_EVERY_S = 10.0
"""A flood of connections is one log line in this time."""

log = structlog.get_logger(__name__)


class RefusalLog:
    """One log line per `LOGGED_EVERY_S` for connections over the limit, with their number."""

    def __init__(self) -> None:
        self._count = 0
        self._quiet_until_s = 0.0

    def add(self, now_s: float, *, connections_max: int) -> None:
        """Note one more."""
        self._count += 1
        if now_s < self._quiet_until_s:
            return
        log.warning("connections.refused", refused=self._count, connections_max=connections_max)
        self._count, self._quiet_until_s = 0, now_s + LOGGED_EVERY_S


def whole_response(error: ApiError, request_id: str) -> bytes:
    """An error as bytes, for a connection that ends with it."""
    body = error.body()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": request_id,
        "connection": "close",
        **error.headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body


def not_http() -> ApiError:
    """What came is no HTTP request."""
    return ApiError(400, "We could not read your request: it is not valid HTTP/1.1.", code="bad_request")


def too_many_connections(most: int) -> ApiError:
    """The server holds as many connections as it may."""
    message = f"This server has {most} open connections, and takes no more at present."
    headers = retry_after(RETRY_AFTER_S)
    return ApiError(503, message, kind="server_error", code="too_many_connections", headers=headers)
