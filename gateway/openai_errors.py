"""Errors in the shape that OpenAI's clients read: a status, and `{"error": {message, type, param, code}}`.

Whatever goes wrong in a call becomes an `ApiError` before it reaches the wire, as a response of its own
or, once a stream has begun, as one `data:` frame (`gateway.sse.error_frame`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from gateway.errors import AdmissionRefused, NotReady
from shared.errors import CALLERS_FAULTS, MeshError

HTTP_INTERNAL_ERROR = 500

RETRY_AFTER_S_MAX = 60
"""SDKs do not retry at all when told to wait longer than they like: Node's limit is 60 s, Python's 120 s."""
RETRY_AFTER_S = 1
"""What a caller is told when nobody knows better."""
QUOTED_CHARS_MAX = 64
"""How much of a caller's value an error message repeats."""


class ApiError(Exception):
    """A failed call, as its caller sees it.

    Args:
        status: HTTP status.
        message: One sentence for people.
        kind: OpenAI's `type`, for example ``invalid_request_error``.
        param: The parameter at fault, when one is.
        code: What a program matches on.
        headers: Further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON body."""
        return json_bytes({"error": self.fields()})

    def fields(self) -> dict[str, str | None]:
        """What its body says of it, all four keys present."""
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}


def json_bytes(value: object) -> bytes:
    """Encode as JSON that no line splitter breaks: U+0085, U+2028 and U+2029 are escaped."""
    data = msgspec.json.encode(value)
    if data.isascii():
        return data
    return (
        data.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


def quoted(value: object) -> str:
    """A caller's value, short enough for a message; what that costs does not grow with the value.

    Strings are cut before they are written out, and of arrays and objects only the kind is told.
    """
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "an array"
    text = repr(value[: QUOTED_CHARS_MAX + 1] if isinstance(value, str) else value)
    return text if len(text) <= QUOTED_CHARS_MAX else text[:QUOTED_CHARS_MAX] + "…"


def invalid_type(param: str, expected: str, value: object) -> ApiError:
    """A parameter of the wrong JSON type."""
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array"}
    got = "null" if value is None else names.get(type(value), "an object")
    message = f"Invalid type for '{param}': expected {expected}, but got {got} instead."
    return ApiError(400, message, param=param, code="invalid_type")


def invalid_value(param: str, message: str, *, code: str = "invalid_value") -> ApiError:
    """A parameter whose value is of the right type but out of bounds or unknown."""
    return ApiError(400, f"Invalid value for '{param}': {message}", param=param, code=code)


def missing(param: str) -> ApiError:
    """A required parameter that is absent."""
    message = f"Missing required parameter: '{param}'."
    return ApiError(400, message, param=param, code="missing_required_parameter")


def unsupported(param: str, reason: str) -> ApiError:
    """A parameter that this server knows and does not honour: refused, never ignored."""
    message = f"Unsupported parameter: '{param}' is not supported by this server: {reason}."
    return ApiError(400, message, param=param, code="unsupported_parameter")


def context_length_exceeded(
    *,
    context_len: int,
    prompt_tokens: int,
    max_tokens: int | None,
    param: str,
    at_least: bool = False,
    source: str = "messages",
) -> ApiError:
    """The prompt, or the prompt with the answer asked for, does not fit the model's window.

    Args:
        context_len: The window.
        prompt_tokens: Of the rendered messages, or the text that came without.
        max_tokens: Of the answer, where the caller named a number.
        param: Under which name it came.
        at_least: The prompt was not tokenized: it is at least so long.
        source: The parameter that is the prompt.
    """
    least = "at least " if at_least else ""
    message = f"This model's maximum context length is {context_len} tokens. However, your {source} resulted in "
    if max_tokens is None:
        message += f"{least}{prompt_tokens} tokens, which leaves no room for an answer. Please shorten the {source}."
    else:
        total = prompt_tokens + max_tokens
        message += f"{least}{prompt_tokens} tokens and you requested {max_tokens} for the answer, "
        message += f"{least}{total} in all. Please shorten the {source} or lower {param}."
    return ApiError(400, message, param=source, code="context_length_exceeded")


def model_not_found(model: str, served: str) -> ApiError:
    """A model that this server does not serve."""
    message = f"The model {quoted(model)} does not exist here; this server serves {served!r}, also as 'default'."
    return ApiError(404, message, param="model", code="model_not_found")


def unauthorized(*, given: bool) -> ApiError:
    """No API key, or none of ours."""
    message = (
        "Incorrect API key provided."
        if given
        else "You didn't provide an API key. Send it in an Authorization header: 'Authorization: Bearer KEY'."
    )
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def from_mesh_error(error: MeshError) -> ApiError:
    """What a caller is told when the mesh refuses a generation or cannot go on with one."""
    if isinstance(error, AdmissionRefused):
        if error.retry_after_s is None:
            return ApiError(400, error.message, code=error.code)
        headers = retry_after(error.retry_after_s)
        return ApiError(429, error.message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)
    if isinstance(error, NotReady):
        return not_ready(error.message)
    if error.code in CALLERS_FAULTS:
        return ApiError(400, error.message, code=error.code)
    return ApiError(503, error.message, kind="server_error", code=error.code, headers=retry_after(RETRY_AFTER_S))


def not_ready(message: str) -> ApiError:
    """No full route exists yet, or no longer."""
    return ApiError(503, message, kind="server_error", code="not_ready", headers=retry_after(RETRY_AFTER_S))


def internal_error() -> ApiError:
    """A fault of ours; the log has what the caller is not told."""
    message = "The server had an error while processing your request."
    return ApiError(HTTP_INTERNAL_ERROR, message, kind="server_error", code="internal_error")


def retry_after(seconds: float) -> dict[str, str]:
    """The header that SDKs honour, kept within what they honour."""
    return {"retry-after": str(max(1, min(RETRY_AFTER_S_MAX, math.ceil(seconds))))}
