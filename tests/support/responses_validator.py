"""Checks a raw stream of the Responses API against everything that clients depend on.

Schema (openai's own types, strictly), the 31 keys of a response, order, rising sequence numbers, items and parts from
their `added` to their `done`, deltas that join to what `done` says, and a last event that agrees with all of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.named_events import split_events

EVENT: TypeAdapter[Any] = TypeAdapter(cast("Any", ResponseStreamEvent))
RESPONSE_KEYS = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage",
    "max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier",
    "prompt_cache_key",
}  # fmt: skip
FINAL = {"response.completed", "response.incomplete", "response.failed"}
DELTAS = {
    "response.output_text.delta": "message",
    "response.reasoning_text.delta": "reasoning",
    "response.function_call_arguments.delta": "function_call",
}


@dataclass
class ValidResponseStream:
    """What a valid stream said."""

    events: list[dict[str, Any]] = field(default_factory=list)
    comments: int = 0
    final: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    @property
    def names(self) -> list[str]:
        """Of the events, in order."""
        return [event["type"] for event in self.events]

    @property
    def text(self) -> str:
        """Of all messages."""
        return output_text(self.final)


def output_text(response: dict[str, Any]) -> str:
    """The text of all messages of a response."""
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def check_response(response: dict[str, Any]) -> dict[str, Any]:
    """Check one response object and return it.

    Raises:
        AssertionError: Naming what is wrong.
    """
    Response.model_validate_json(json.dumps(response), strict=True)
    assert set(response) >= RESPONSE_KEYS, RESPONSE_KEYS - set(response)
    assert (response["completed_at"] is not None) == (response["status"] == "completed")
    assert (response["incomplete_details"] is not None) == (response["status"] == "incomplete")
    assert (response["error"] is not None) == (response["status"] == "failed")
    ids = [item["id"] for item in response["output"]]
    assert len(set(ids)) == len(ids), "ids of items are unique"
    for item in response["output"]:
        if item["type"] == "function_call" and item["status"] == "completed":
            assert isinstance(json.loads(item["arguments"]), dict)
    return response


def validate_response_stream(body: bytes) -> ValidResponseStream:
    """Read a whole stream.

    Raises:
        AssertionError: Naming what is wrong.
    """
    events, comments = split_events(body)
    result = ValidResponseStream(events, comments)
    reader = _Reader()
    for number, event in enumerate(events):
        EVENT.validate_json(json.dumps(event), strict=True)
        assert event["sequence_number"] == number, "sequence numbers rise by one"
        if event["type"] == "error":
            result.error = event
            assert event is events[-1], "an error is the last event"
            assert reader.final.get("status") == "failed", "an error follows a failed response"
        else:
            reader.read(event)
    assert reader.final, "no last event"
    result.final = reader.final
    assert (result.error is not None) == (reader.final["status"] == "failed")
    return result


class _Reader:
    """State of one stream."""

    def __init__(self) -> None:
        self.final: dict[str, Any] = {}
        self._id: str | None = None
        self._seen = 0
        self._done: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        self._text: str | None = None
        self._logprobs: list[Any] = []

    def read(self, event: dict[str, Any]) -> None:
        assert not self.final, f"event after the last: {event['type']}"
        kind = event["type"]
        if self._seen < 2:
            assert kind == ("response.created", "response.in_progress")[self._seen], "how a stream begins"
        self._seen += 1
        if "response" in event:
            self._read_response(kind, event["response"])
        elif kind == "response.output_item.added":
            self._add_item(event)
        else:
            self._check_place(event)
            self._read_inside(kind, event)

    def _read_response(self, kind: str, response: dict[str, Any]) -> None:
        check_response(response)
        assert self._id in (None, response["id"]), "one identity"
        self._id = response["id"]
        if kind not in FINAL:
            assert response["status"] == "in_progress"
            assert response["output"] == []
            return
        status = "cancelled" if response["status"] == "cancelled" else kind.removeprefix("response.")
        assert response["status"] == status
        self.final = response
        if status in ("completed", "incomplete"):
            assert self._item is None, "an item is still open"
            assert response["usage"] is not None
            assert response["output"] == self._done, "the response agrees with the items"
        else:
            assert response["output"][: len(self._done)] == self._done

    def _add_item(self, event: dict[str, Any]) -> None:
        assert self._item is None, "items come one after the other"
        assert event["output_index"] == len(self._done)
        self._item, self._text, self._logprobs = event["item"], None, []
        assert self._item["status"] == "in_progress"
        if self._item["type"] == "function_call":
            assert self._item["arguments"] == ""
            assert self._item["call_id"]
            self._text = ""
        else:
            assert self._item["content"] == []

    def _check_place(self, event: dict[str, Any]) -> None:
        assert self._item is not None, f"{event['type']} outside of an item"
        assert event["output_index"] == len(self._done)
        assert event.get("item_id", self._item["id"]) == self._item["id"]
        assert event.get("content_index", 0) == 0

    def _read_inside(self, kind: str, event: dict[str, Any]) -> None:
        assert self._item is not None
        if kind == "response.content_part.added":
            assert self._text is None
            assert event["part"]["text"] == ""
            self._text = ""
            return
        assert self._text is not None, f"{kind} before its part"
        if kind in DELTAS:
            assert self._item["type"] == DELTAS[kind]
            assert event["delta"], "a delta says something"
            self._text += event["delta"]
            self._logprobs += event.get("logprobs", [])
        elif kind == "response.content_part.done":
            assert event["part"]["text"] == self._text
        elif kind == "response.output_item.done":
            self._close(event["item"])
        else:
            assert event.get("text", event.get("arguments")) == self._text, "deltas join to the whole"
            assert event.get("logprobs", self._logprobs) == self._logprobs

    def _close(self, item: dict[str, Any]) -> None:
        assert self._item is not None
        assert (item["id"], item["type"]) == (self._item["id"], self._item["type"])
        assert item["status"] in ("completed", "incomplete")
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert text == self._text
        self._done.append(item)
        self._item = None
