"""Checks a raw chat-completion stream against everything that clients depend on.

Schema (openai's own types, strictly), order, one identity, the role once, finish reasons, usage, the end
marker, and bytes that no line splitter breaks. Every stream that a test reads goes through here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk

FINISH_REASONS = {"stop", "length"}
CHUNK_KEYS = {"id", "object", "created", "model", "system_fingerprint", "choices"}


@dataclass
class ValidStream:
    """What a valid stream said."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    comments: int = 0
    chunks: list[dict[str, Any]] = field(default_factory=list)


def validate_stream(body: bytes, *, include_usage: bool = False) -> ValidStream:
    """Read a whole stream.

    Args:
        body: Everything after the response's headers.
        include_usage: Whether the call asked for usage.

    Raises:
        AssertionError: Naming what is wrong.
    """
    payloads, comments = split_frames(body)
    result = ValidStream(comments=comments)
    done = False
    for payload in payloads:
        assert not done, f"frame after [DONE]: {payload}"
        assert result.error is None, f"frame after an error: {payload}"
        if payload == "[DONE]":
            done = True
            continue
        frame = json.loads(payload)
        if "error" in frame:
            result.error = _check_error(frame)
        else:
            _check_chunk(frame, result, include_usage=include_usage)
    if result.error is not None:
        assert not done, "an error frame is the last"
        assert result.finish_reason is None, "a stream that failed must not look finished"
        return result
    assert done, "no [DONE]"
    assert result.finish_reason in FINISH_REASONS, f"finish_reason {result.finish_reason!r}"
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


def _check_error(frame: dict[str, Any]) -> dict[str, Any]:
    assert set(frame) == {"error"}
    error = dict(frame["error"])
    assert set(error) == {"message", "type", "param", "code"}, f"error keys: {sorted(error)}"
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


def _check_chunk(frame: dict[str, Any], result: ValidStream, *, include_usage: bool) -> None:
    ChatCompletionChunk.model_validate(frame, strict=True)
    assert frame["object"] == "chat.completion.chunk"
    assert set(frame) == CHUNK_KEYS | ({"usage"} if include_usage else set()), f"chunk keys: {sorted(frame)}"
    if result.chunks:
        for key in ("id", "created", "model", "system_fingerprint"):
            assert frame[key] == result.chunks[0][key], f"{key} changed within the stream"
    first = not result.chunks
    result.chunks.append(frame)
    assert result.usage is None, "chunk after the usage chunk"
    if not frame["choices"]:
        _check_usage_chunk(frame, result, include_usage=include_usage)
        return
    assert frame.get("usage") is None, "usage only in its own chunk"
    assert result.finish_reason is None, "choice after its finish_reason"
    (choice,) = frame["choices"]
    assert set(choice) == {"index", "delta", "logprobs", "finish_reason"}, f"choice keys: {sorted(choice)}"
    assert choice["index"] == 0
    _check_delta(choice, result, first=first)


def _check_delta(choice: dict[str, Any], result: ValidStream, *, first: bool) -> None:
    delta = choice["delta"]
    if first:
        assert delta == {"role": "assistant", "content": ""}, f"first delta: {delta}"
        assert choice["finish_reason"] is None
    elif choice["finish_reason"] is None:
        assert set(delta) == {"content"}, f"content delta: {delta}"
        assert delta["content"], "empty content delta"
        result.text += delta["content"]
    else:
        assert delta == {}, f"last delta: {delta}"
        result.finish_reason = choice["finish_reason"]


def _check_usage_chunk(frame: dict[str, Any], result: ValidStream, *, include_usage: bool) -> None:
    assert include_usage, "usage chunk without being asked"
    assert result.finish_reason is not None, "usage before the choice's end"
    usage = frame["usage"]
    CompletionUsage.model_validate(usage, strict=True)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    result.usage = usage
