"""What a chat completion looks like on the wire, as one JSON body or as server-sent events.

Frames are written by hand around a prefix that is made once per stream, because one is sent per token.
Order of a stream: `role`, `content`…, `finish`, `usage` when asked for, `DONE`. Each frame is one
``data:`` line and a blank one; comments (`KEEP_ALIVE`) may stand between frames.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.answer import FinishReason
from gateway.openai_errors import ApiError, json_bytes

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

STREAM_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
"""No length, no compression, and no proxy that waits for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one call. `completion_tokens` counts every token generated, an end-of-turn token too."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def to_json(self) -> dict[str, object]:
        """As the API writes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionIdentity:
    """What every body and frame of one completion repeats.

    Args:
        completion_id: ``chatcmpl-…``.
        created: Unix seconds.
        model: The name the model is served under.
        fingerprint: Names the weights, so that a caller who sets a seed notices when they change.
    """

    completion_id: str
    created: int
    model: str
    fingerprint: str


class ChunkEncoder:
    """Writes the frames of one stream.

    Args:
        identity: Repeated in every frame.
        include_usage: Whether the caller asked for a usage frame; then every other frame has ``"usage": null``.
    """

    def __init__(self, identity: CompletionIdentity, *, include_usage: bool) -> None:
        shared = {
            "id": identity.completion_id,
            "object": "chat.completion.chunk",
            "created": identity.created,
            "model": identity.model,
            "system_fingerprint": identity.fingerprint,
        }
        self._head = b"data: " + json_bytes(shared)[:-1]
        self._content_head = self._head + b',"choices":[{"index":0,"delta":{"content":'
        usage = b',"usage":null' if include_usage else b""
        self._end = b"}]" + usage + b"}\n\n"
        self._content_end = b'},"logprobs":null,"finish_reason":null' + self._end

    def role(self) -> bytes:
        """The first frame, and the only one that names the role."""
        delta = b',"choices":[{"index":0,"delta":{"role":"assistant","content":""'
        return self._head + delta + self._content_end

    def content(self, text: str) -> bytes:
        """A frame of text."""
        return self._content_head + json_bytes(text) + self._content_end

    def finish(self, reason: FinishReason) -> bytes:
        """The last frame of the choice: an empty delta and why it ended."""
        delta = b',"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":'
        return self._head + delta + json_bytes(reason) + self._end

    def usage(self, usage: Usage) -> bytes:
        """The frame after the choices, sent only on request."""
        return self._head + b',"choices":[],"usage":' + json_bytes(usage.to_json()) + b"}\n\n"


def error_frame(error: ApiError) -> bytes:
    """The one frame that ends a stream which cannot go on."""
    return b"data: " + error.body() + b"\n\n"


def completion_body(identity: CompletionIdentity, text: str, reason: FinishReason, usage: Usage) -> bytes:
    """The whole answer of a non-streaming call."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return json_bytes(
        {
            "id": identity.completion_id,
            "object": "chat.completion",
            "created": identity.created,
            "model": identity.model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
            "usage": usage.to_json(),
            "system_fingerprint": identity.fingerprint,
        }
    )
