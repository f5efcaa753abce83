"""What a message looks like on the wire, as one JSON body or as server-sent events.

Order of a stream: `message_start`; each block from its `content_block_start` to its `content_block_stop`;
`message_delta` with why it ended and the usage; `message_stop`. A `ping` may stand anywhere. Whole and streamed
messages are made by the same code from the same pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.answer import Answer, Piece
from gateway.answer_encoder import Usage
from gateway.generation_request import PromptScores
from gateway.messages.blocks import Blocks, MessageEvent
from gateway.messages.errors import error_json
from gateway.openai_errors import ApiError, json_bytes
from gateway.sse_event import named_event

PING = named_event({"type": "ping"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageIdentity:
    """What one message is.

    Args:
        message_id: ``msg_…``.
        model: The name the model is served under.
        prompt_tokens: Said at the start of a stream.
        request_id: Repeated in errors.
    """

    message_id: str
    model: str
    prompt_tokens: int
    request_id: str


class MessageEncoder:
    """An `AnswerEncoder` for messages, of one answer.

    Args:
        identity: What the message is.
        shows_thinking: Whether thinking is part of it.
    """

    keep_alive = PING
    works_in_threads = True
    prompt_tokens_shown = 0

    def __init__(self, identity: MessageIdentity, *, shows_thinking: bool) -> None:
        self._identity = identity
        self._blocks = Blocks(shows_thinking=shows_thinking)
        self._ending = _ending(None)

    def begin(self, _scores: PromptScores) -> bytes:
        """The message, as yet without content."""
        usage = usage_json(Usage(prompt_tokens=self._identity.prompt_tokens, completion_tokens=0))
        return _frames([{"type": "message_start", "message": self._message([], usage)}])

    def piece(self, _choice: int, piece: Piece) -> bytes:
        """What a token adds to the content."""
        return _frames(self._blocks.push(piece))

    def finish(self, _choice: int, answer: Answer) -> bytes:
        """The last block closes."""
        events = self._blocks.finish(is_cut=answer.finish_reason == "length")
        self._ending = self._end_of(answer)
        return _frames(events)

    def end(self, usage: Usage) -> bytes:
        """Why it ended, and what it took."""
        delta = {"type": "message_delta", "delta": self._ending, "usage": delta_usage_json(usage)}
        return _frames([delta, {"type": "message_stop"}])

    def error(self, error: ApiError) -> bytes:
        """An event that clients raise."""
        return _frames([{"type": "error", "error": error_json(error), "request_id": self._identity.request_id}])

    def whole(self, answers: Sequence[Answer], _scores: PromptScores, usage: Usage) -> bytes:
        """The whole message of a call that does not stream."""
        (answer,) = answers
        for piece in answer.transcript.pieces:
            self._blocks.push(piece)
        self.finish(0, answer)
        return json_bytes(self._message(self._blocks.content(), usage_json(usage)))

    def _message(self, content: list[dict[str, object]], usage: dict[str, object]) -> dict[str, object]:
        return {
            "id": self._identity.message_id,
            "type": "message",
            "role": "assistant",
            "model": self._identity.model,
            "content": content,
            **self._ending,
            "usage": usage,
        }

    def _end_of(self, answer: Answer) -> dict[str, object]:
        if answer.finish_reason == "length":
            return _ending("max_tokens")
        if isinstance(answer.stop_reason, str):
            return _ending("stop_sequence", answer.stop_reason)
        return _ending("tool_use" if self._blocks.has_tool_use else "end_turn")


def _ending(reason: str | None, sequence: str | None = None) -> dict[str, object]:
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "container": None}


def usage_json(usage: Usage) -> dict[str, object]:
    """As messages write it, keys for what is not to be had here included."""
    nothing_to_tell = {"cache_creation": None, "inference_geo": None, "service_tier": "standard"}
    return {**delta_usage_json(usage), **nothing_to_tell}


def delta_usage_json(usage: Usage) -> dict[str, object]:
    """As the end of a stream writes it: what was cached is not among the input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "server_tool_use": None,
    }


def _frames(events: Sequence[MessageEvent]) -> bytes:
    return b"".join(named_event(event) for event in events)
