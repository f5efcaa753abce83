"""Checks a raw chat-completion stream against everything that clients depend on.

Schema (openai's own types, strictly), order, one identity, roles, ids and names once, indices in order of
appearance, finish reasons, usage, the end marker, and bytes that no line splitter breaks. Every chat stream that
a test reads goes through here; `split_frames` serves streams of other endpoints too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk

FINISH_REASONS = {"stop", "length", "tool_calls"}
CHUNK_KEYS = {"id", "object", "created", "model", "system_fingerprint", "choices"}
CHOICE_KEYS = {"index", "delta", "logprobs", "finish_reason"}
CHOICE_EXTRAS = {"stop_reason", "token_ids", "prompt_token_ids"}
DELTAS = ({"content"}, {"reasoning_content", "reasoning"}, {"tool_calls"})
"""What one delta may hold, after the first and before the last."""


@dataclass
class StreamedCall:
    """A tool call as a client has it after the stream."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class StreamedChoice:
    """One choice as a client has it after the stream."""

    text: str = ""
    reasoning: str = ""
    calls: list[StreamedCall] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None


@dataclass
class ValidStream:
    """What a valid stream said; `text`, `finish_reason` and so on are those of the first choice."""

    choices: dict[int, StreamedChoice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    comments: int = 0
    chunks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def first(self) -> StreamedChoice:
        """Choice 0, empty if it never appeared."""
        return self.choices.get(0, StreamedChoice())

    @property
    def text(self) -> str:
        """Its content."""
        return self.first.text

    @property
    def finish_reason(self) -> str | None:
        """Why it ended."""
        return self.first.finish_reason


def validate_stream(body: bytes, *, include_usage: bool = False, continuous_usage: bool = False) -> ValidStream:
    """Read a whole stream.

    Args:
        body: Everything after the response's headers.
        include_usage: Whether the call asked for usage.
        continuous_usage: Whether it asked for usage with every chunk.

    Raises:
        AssertionError: Naming what is wrong.
    """
    payloads, comments = split_frames(body)
    result = ValidStream(comments=comments)
    reader = _Reader(result, include_usage=include_usage, continuous_usage=continuous_usage)
    done = False
    for payload in payloads:
        assert not done, f"frame after [DONE]: {payload}"
        assert result.error is None, f"frame after an error: {payload}"
        if payload == "[DONE]":
            done = True
            continue
        frame = json.loads(payload)
        if "error" in frame:
            result.error = check_error(frame)
        else:
            reader.read(frame)
    if result.error is not None:
        assert not done, "an error frame is the last"
        assert not result.choices or any(not choice.finish_reason for choice in result.choices.values()), (
            "a stream that failed must not look finished"
        )
        return result
    assert done, "no [DONE]"
    assert result.choices, "no choice"
    for choice in result.choices.values():
        assert choice.finish_reason in FINISH_REASONS, f"finish_reason {choice.finish_reason!r}"
        _check_calls(choice)
    assert (result.usage is not None) == include_usage, "usage exactly when asked for"
    return result


def split_frames(body: bytes) -> tuple[list[str], int]:
    """The payloads of the `data:` frames in order, and how many comments there were."""
    text = body.decode("utf-8")
    assert text.endswith("\n\n") or not text, f"unfinished frame: {text[-80:]!r}"
    assert "\r" not in text, "LF only"
    payloads, comments = [], 0
    for frame in text.split("\n\n")[:-1]:
        assert len(frame.splitlines()) == 1, f"a frame is one line for every splitter: {frame!r}"
        if frame.startswith(":"):
            comments += 1
            continue
        assert frame.startswith("data: "), f"not a data frame: {frame!r}"
        payload = frame.removeprefix("data: ")
        assert payload, "empty data frame"
        payloads.append(payload)
    return payloads, comments


def check_error(frame: dict[str, Any]) -> dict[str, Any]:
    """An error object as clients read it."""
    assert set(frame) == {"error"}
    error = dict(frame["error"])
    assert set(error) == {"message", "type", "param", "code"}, f"error keys: {sorted(error)}"
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


def _check_calls(choice: StreamedChoice) -> None:
    if choice.finish_reason == "length":
        return  # cut: the last call may be incomplete
    for call in choice.calls:
        assert isinstance(json.loads(call.arguments), dict), f"arguments of {call.name}: {call.arguments!r}"


class _Reader:
    """Takes in chunks, one after the other."""

    def __init__(self, result: ValidStream, *, include_usage: bool, continuous_usage: bool) -> None:
        self._result = result
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    def read(self, frame: dict[str, Any]) -> None:
        result = self._result
        ChatCompletionChunk.model_validate(frame, strict=True)
        assert frame["object"] == "chat.completion.chunk"
        keys = CHUNK_KEYS | ({"usage"} if self._include_usage or self._continuous_usage else set())
        assert set(frame) - {"service_tier"} == keys, f"chunk keys: {sorted(frame)}"
        if result.chunks:
            for key in ("id", "created", "model", "system_fingerprint"):
                assert frame[key] == result.chunks[0][key], f"{key} changed within the stream"
        result.chunks.append(frame)
        assert result.usage is None, "chunk after the usage chunk"
        if not frame["choices"]:
            self._read_usage(frame)
            return
        if not self._continuous_usage:
            assert frame.get("usage") is None, "usage only in its own chunk"
        (choice,) = frame["choices"]
        self._read_choice(choice)

    def _read_choice(self, choice: dict[str, Any]) -> None:
        assert set(choice) - CHOICE_EXTRAS == CHOICE_KEYS, f"choice keys: {sorted(choice)}"
        index, delta = choice["index"], choice["delta"]
        held = self._result.choices.get(index)
        if held is None:
            assert index == len(self._result.choices), "choices appear in the order of their indices"
            assert delta == {"role": "assistant", "content": ""}, f"first delta: {delta}"
            assert choice["finish_reason"] is None
            held = self._result.choices[index] = StreamedChoice()
        else:
            assert held.finish_reason is None, "choice after its finish_reason"
            self._read_delta(held, choice)
        held.logprobs += (choice["logprobs"] or {}).get("content") or []
        held.token_ids += choice.get("token_ids", [])

    def _read_delta(self, held: StreamedChoice, choice: dict[str, Any]) -> None:
        delta = choice["delta"]
        if choice["finish_reason"] is not None:
            assert delta == {}, f"last delta: {delta}"
            held.finish_reason, held.stop_reason = choice["finish_reason"], choice.get("stop_reason")
            return
        assert set(delta) in DELTAS, f"content delta: {delta}"
        if "content" in delta:
            assert delta["content"], "empty content delta"
            held.text += delta["content"]
        elif "reasoning" in delta:
            assert delta["reasoning"], "empty reasoning delta"
            assert delta["reasoning"] == delta["reasoning_content"], "both names say the same"
            held.reasoning += delta["reasoning"]
        else:
            (call,) = delta["tool_calls"]
            _read_call(held, call)

    def _read_usage(self, frame: dict[str, Any]) -> None:
        result = self._result
        assert self._include_usage, "usage chunk without being asked"
        assert all(choice.finish_reason for choice in result.choices.values()), "usage before the choice's end"
        usage = frame["usage"]
        CompletionUsage.model_validate(usage, strict=True)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        result.usage = usage


def _read_call(held: StreamedChoice, call: dict[str, Any]) -> None:
    index = call["index"]
    if index == len(held.calls):
        assert set(call) == {"index", "id", "type", "function"}, f"first delta of a call: {call}"
        assert call["type"] == "function"
        assert set(call["function"]) == {"name", "arguments"}
        assert call["id"], "a call has an id"
        assert call["id"] not in {other.id for other in held.calls}, "ids are unique"
        held.calls.append(StreamedCall(call["id"], call["function"]["name"], call["function"]["arguments"]))
        return
    assert index == len(held.calls) - 1, "calls come one after the other"
    assert set(call) == {"index", "function"}, f"id, type and name are sent once: {call}"
    assert set(call["function"]) == {"arguments"}
    held.calls[index].arguments += call["function"]["arguments"]
