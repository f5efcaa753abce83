"""Which shape an error has: the one that callers of its path read."""

from __future__ import annotations

from gateway.messages.errors import error_body, error_status, speaks_anthropic
from gateway.openai_errors import ApiError


def shape_error(path: str, error: ApiError, request_id: str) -> tuple[int, bytes]:
    """Status and body of an error response."""
    if speaks_anthropic(path):
        return error_status(error), error_body(error, request_id)
    return error.status, error.body()
