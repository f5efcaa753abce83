"""Reading a request's body, within limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from litestar.types import Receive

from gateway.openai_errors import ApiError
from gateway.request_record import ClientLeft

BODY_READ_S = 60.0
"""A body within the size limit arrives in this time over any link that could carry an answer."""
JSON_TYPES = ("application/json", "text/json")


async def read_json_body(receive: Receive, headers: Mapping[str, str], *, bytes_max: int) -> bytes:
    """Read the whole body of a request that announces JSON, or announces nothing.

    Raises:
        ApiError: 413 over the limit, 415 for another content type, 408 when it does not arrive in time.
        ClientLeft: If the client closed the connection before the end.
    """
    check_content_type(headers.get("content-type", ""))
    announced = headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > bytes_max:
        raise _too_large(bytes_max)
    try:
        async with asyncio.timeout(BODY_READ_S):
            return await _read(receive, bytes_max)
    except TimeoutError as error:
        message = f"The body of your request did not arrive within {BODY_READ_S:g} s."
        raise ApiError(408, message, code="request_timeout") from error


def check_content_type(content_type: str) -> None:
    """Accept JSON and silence; a browser cannot send either to another site without asking first.

    Raises:
        ApiError: 415.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    is_json = media_type in JSON_TYPES or (media_type.startswith("application/") and media_type.endswith("+json"))
    if media_type and not is_json:
        message = f"Unsupported content type {media_type[:64]!r}: send 'Content-Type: application/json'."
        raise ApiError(415, message, code="unsupported_content_type")


async def _read(receive: Receive, bytes_max: int) -> bytes:
    body = bytearray()
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message["body"]
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
        if not message["more_body"]:
            return bytes(body)


def _too_large(bytes_max: int) -> ApiError:
    message = f"The body of your request is larger than the {bytes_max} bytes that this server reads."
    return ApiError(413, message, code="request_too_large")
