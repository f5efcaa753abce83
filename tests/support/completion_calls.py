"""Calls of text completions, whole and streamed, every stream validated."""

from __future__ import annotations

from typing import Any

import httpx

from tests.support.api_server import MODEL, ApiServer
from tests.support.completion_validator import ValidTextStream, validate_text_stream


def complete(api: ApiServer, **body: Any) -> httpx.Response:
    """POST."""
    return api.http.post("/v1/completions", json={"model": MODEL, **body})


def choices(api: ApiServer, **body: Any) -> list[dict[str, Any]]:
    """Of a call that is not streamed, in their order."""
    response = complete(api, **body)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    assert [choice["index"] for choice in found] == list(range(len(found)))
    return found


def stream(api: ApiServer, **body: Any) -> ValidTextStream:
    """A streamed call, validated."""
    response = complete(api, stream=True, **body)
    assert response.status_code == 200, response.text
    options = body.get("stream_options") or {}
    return validate_text_stream(
        response.content,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
    )
