"""Checks a raw stream of Anthropic's Messages API against what its clients depend on.

Order (`message_start`, blocks one after the other, `message_delta`, `message_stop`), indices, required keys, deltas of
the right kind for their block, and an input of a tool that is JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.support.named_events import split_events

DELTA_KEYS = {"stop_reason", "stop_sequence", "stop_details", "container"}
MESSAGE_KEYS = {"id", "type", "role", "model", "content", "usage", *DELTA_KEYS}
DELTA_USAGE_KEYS = {
    "input_tokens",
    "output_tokens",
    "output_tokens_details",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "server_tool_use",
}
USAGE_KEYS = {*DELTA_USAGE_KEYS, "cache_creation", "inference_geo", "service_tier"}
STOP_REASONS = {"end_turn", "max_tokens", "stop_sequence", "tool_use"}
EMPTY_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": "", "citations": None},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
}


@dataclass
class ValidMessageStream:
    """What a valid stream said; `message` is what a client has put together after it."""

    events: list[dict[str, Any]] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)
    partial_inputs: dict[int, str] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """Of all text blocks."""
        return "".join(block["text"] for block in self.message["content"] if block["type"] == "text")

    @property
    def pings(self) -> int:
        """How many there were."""
        return sum(event["type"] == "ping" for event in self.events)


def check_message(message: dict[str, Any]) -> dict[str, Any]:
    """Check one whole message and return it.

    Raises:
        AssertionError: Naming what is wrong.
    """
    assert set(message) == MESSAGE_KEYS
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert set(message["usage"]) == USAGE_KEYS
    assert message["stop_reason"] in STOP_REASONS
    assert (message["stop_sequence"] is not None) == (message["stop_reason"] == "stop_sequence")
    uses = [block for block in message["content"] if block["type"] == "tool_use"]
    assert all(isinstance(use["input"], dict) for use in uses)
    assert len({use["id"] for use in uses}) == len(uses)
    return message


def check_error(error: dict[str, Any]) -> dict[str, Any]:
    """Check the body of an error, or an error event, and return its `error`.

    Raises:
        AssertionError: Naming what is wrong.
    """
    assert set(error) == {"type", "error", "request_id"}
    assert error["type"] == "error"
    assert set(error["error"]) - {"details"} == {"type", "message"}
    return dict(error["error"])


def validate_message_stream(body: bytes) -> ValidMessageStream:
    """Read a whole stream.

    Raises:
        AssertionError: Naming what is wrong.
    """
    events, comments = split_events(body)
    assert comments == 0, "silence is filled with pings"
    result = ValidMessageStream(events)
    reader = _Reader(result)
    for event in events:
        assert not reader.has_ended, f"event after the last: {event}"
        if event["type"] == "error":
            result.error = check_error(event)
            reader.has_ended = True
        elif event["type"] != "ping":
            reader.read(event)
    assert reader.has_ended, "no message_stop"
    if result.error is None:
        check_message(result.message)
        if result.message["stop_reason"] == "tool_use":
            assert all(isinstance(json.loads(text), dict) for text in result.partial_inputs.values())
    return result


class _Reader:
    """State of one stream."""

    def __init__(self, result: ValidMessageStream) -> None:
        self.has_ended = False
        self._result = result
        self._block: dict[str, Any] | None = None

    def read(self, event: dict[str, Any]) -> None:
        kind, message = event["type"], self._result.message
        if not message:
            assert kind == "message_start", "how a stream begins"
            assert set(event["message"]) == MESSAGE_KEYS
            assert event["message"]["content"] == []
            assert event["message"]["stop_reason"] is None
            self._result.message = event["message"]
        elif kind == "content_block_start":
            self._start(event)
        elif kind == "content_block_delta":
            self._add(event)
        elif kind == "content_block_stop":
            self._stop(event)
        elif kind == "message_delta":
            assert self._block is None, "a block is still open"
            assert message["stop_reason"] is None, "one message_delta"
            assert set(event["delta"]) == DELTA_KEYS
            assert set(event["usage"]) == DELTA_USAGE_KEYS
            message.update(event["delta"], usage={**message["usage"], **event["usage"]})
        else:
            assert kind == "message_stop", f"unknown event: {kind}"
            assert message["stop_reason"] is not None
            self.has_ended = True

    def _start(self, event: dict[str, Any]) -> None:
        content = self._result.message["content"]
        assert self._block is None, "blocks come one after the other"
        assert event["index"] == len(content)
        self._block = event["content_block"]
        if self._block["type"] == "tool_use":
            assert set(self._block) == {"type", "id", "name", "input", "caller"}
            assert self._block["input"] == {}
            self._result.partial_inputs[len(content)] = ""
        else:
            assert self._block == EMPTY_BLOCKS[self._block["type"]]
        content.append(self._block)

    def _add(self, event: dict[str, Any]) -> None:
        assert self._block is not None, "a delta outside of a block"
        assert event["index"] == len(self._result.message["content"]) - 1
        kind, name = DELTAS[event["delta"]["type"]]
        assert self._block["type"] == kind
        text = event["delta"][name]
        assert text, "a delta says something"
        if kind == "tool_use":
            self._result.partial_inputs[event["index"]] += text
        else:
            assert not self._block.get("signature"), "thinking after its signature"
            self._block[name] += text

    def _stop(self, event: dict[str, Any]) -> None:
        assert self._block is not None
        assert event["index"] == len(self._result.message["content"]) - 1
        if self._block["type"] == "thinking":
            assert self._block["signature"]
        if self._block["type"] == "tool_use":
            self._block["input"] = _decoded(self._result.partial_inputs[event["index"]])
        self._block = None


def _decoded(text: str) -> Any:
    """The input of a tool; one that was not finished is an empty one."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
