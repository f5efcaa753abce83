"""Server-sent events as OpenAI's clients read them: one ``data:`` line and a blank one.

No ``id:``, no empty frames, no CRLF, and JSON that no line splitter breaks: clients choke on all of these.
"""

from __future__ import annotations

from gateway.openai_errors import ApiError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: the only thing that all clients skip."""


def error_frame(error: ApiError) -> bytes:
    """The one frame that ends a stream which cannot go on."""
    return b"data: " + error.body() + b"\n\n"
