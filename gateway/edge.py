"""The outermost layer of the HTTP side: what holds for every response, whoever made it.

Request id, API key, CORS, HEAD (a GET without its body), preflights, and the one `request.finished` log
line. It wraps Litestar's own handler, so that 404s, 405s and errors carry the same headers as answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog
from litestar.types import ASGIApp, Receive, Send

from gateway.api_keys import OPEN_PATHS, ApiKeys
from gateway.cors import CorsPolicy, Headers
from gateway.error_dialect import shape_error
from gateway.messages.errors import speaks_anthropic
from gateway.openai_errors import ApiError
from gateway.request_record import STATUS_CLIENT_LEFT, ClientLeft, RequestRecord, choose_request_id
from shared.clock import Clock

log = structlog.get_logger(__name__)


class Edge:
    """An ASGI application around another.

    Args:
        app: What answers.
        api_keys: Who may call.
        cors: Which web pages may call.
        clock: Times calls.
    """

    def __init__(self, app: ASGIApp, *, api_keys: ApiKeys, cors: CorsPolicy, clock: Clock) -> None:
        self._app = app
        self._api_keys = api_keys
        self._cors = cors
        self._clock = clock

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        record = RequestRecord(choose_request_id(headers), self._clock.monotonic())
        extra = [*_id_headers(scope["path"], record.request_id), *self._cors.headers(headers)]
        is_head = scope["method"] == "HEAD"
        try:
            await self._answer(scope, headers, record, receive, _decorated(send, record, extra, is_head=is_head))
        except ClientLeft as left:
            record.status = STATUS_CLIENT_LEFT
            record.fields.setdefault("client_left", left.how)
        finally:
            self._write_log(scope, record)

    async def _answer(
        self, scope: Any, headers: Mapping[bytes, bytes], record: RequestRecord, receive: Receive, send: Send
    ) -> None:
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await send_whole(send, 204, b"", self._cors.preflight(headers))
            return
        refused = self._api_keys.check(scope["path"], headers)
        if refused is not None:
            record.fields["error"] = refused.code
            await send_error(send, refused, path=scope["path"], request_id=record.request_id)
            return
        is_head = scope["method"] == "HEAD"
        state = {**scope.get("state", {}), "record": record, "is_head": is_head}
        method = "GET" if is_head else scope["method"]
        inner: Any = {**scope, "method": method, "state": state}
        await self._app(inner, receive, send)

    def _write_log(self, scope: Any, record: RequestRecord) -> None:
        write = log.debug if scope["path"] in OPEN_PATHS else log.info
        write(
            "request.finished",
            request_id=record.request_id,
            method=scope["method"],
            path=scope["path"],
            status=record.status,
            duration_ms=round((self._clock.monotonic() - record.started_s) * 1000, 1),
            **record.fields,
        )


def _decorated(send: Send, record: RequestRecord, extra: Headers, *, is_head: bool) -> Send:
    """`send` that adds headers to the response's start, and drops the body of an answer to HEAD."""

    async def decorated(message: Any) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            message = {**message, "headers": [*message["headers"], *extra]}
        elif is_head:
            message = {**message, "body": b""}
        await send(message)

    return decorated


def _id_headers(path: str, request_id: str) -> Headers:
    """The request id under the name that callers of this path look for, and always under our own."""
    value = request_id.encode()
    own = [(b"x-request-id", value)]
    return [*own, (b"request-id", value)] if speaks_anthropic(path) else own


async def send_error(send: Send, error: ApiError, *, path: str, request_id: str) -> None:
    """Send an error as a whole response, in the shape of its path."""
    headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    status, body = shape_error(path, error, request_id)
    await send_whole(send, status, body, headers)


async def send_whole(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Send a JSON response in one piece; an empty body has no type."""
    about = [(b"content-type", b"application/json")] if body else []
    about.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": [*about, *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
