"""Errors as Anthropic's clients read them: ``{"type": "error", "error": {type, message}, "request_id"}``."""

from __future__ import annotations

from gateway.openai_errors import ApiError, json_bytes

PATH_PREFIX = "/v1/messages"
HTTP_UNAVAILABLE = 503
HTTP_OVERLOADED = 529
"""Anthropic's own status for a server that has no room; its clients try again."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    HTTP_UNAVAILABLE: "overloaded_error",
}

_DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}
"""By the parameter at fault: what tells Anthropic's SDK to go on without it, by itself."""


def speaks_anthropic(path: str) -> bool:
    """Whether callers of this path expect Anthropic's shapes."""
    return path == PATH_PREFIX or path.startswith(f"{PATH_PREFIX}/")


def error_status(error: ApiError) -> int:
    """The HTTP status."""
    return HTTP_OVERLOADED if error.status == HTTP_UNAVAILABLE else error.status


def error_json(error: ApiError) -> dict[str, object]:
    """The `error` of a body or an event; the message names the parameter, for which there is no key."""
    server_error = "api_error" if error.status >= 500 else "invalid_request_error"
    details = _DETAILS.get(error.param or "")
    shown: dict[str, object] = {"type": _TYPES.get(error.status, server_error), "message": error.message}
    return shown if details is None else {**shown, "details": details}


def error_body(error: ApiError, request_id: str) -> bytes:
    """The body of an error response."""
    return json_bytes({"type": "error", "error": error_json(error), "request_id": request_id})
