"""Checks a raw stream of text completions against everything that clients depend on.

The sibling of `tests.support.stream_validator`: schema (openai's own types, but for the nulls that OpenAI itself
sends and its types leave out), order, one identity, indices, finish reasons, log-probabilities, usage, the end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from openai.types import Completion, CompletionUsage

from tests.support.stream_validator import check_error, split_frames

FINISH_REASONS = {"stop", "length"}
CHUNK_KEYS = {"id", "object", "created", "model", "system_fingerprint", "choices"}
CHOICE_KEYS = {"index", "text", "logprobs", "finish_reason"}
CHOICE_EXTRAS = {"stop_reason", "token_ids", "prompt_token_ids"}
LOGPROB_KEYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass
class StreamedText:
    """One choice as a client has it after the stream."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: dict[str, list[Any]] = field(default_factory=lambda: {key: [] for key in LOGPROB_KEYS})
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)


@dataclass
class ValidTextStream:
    """What a valid stream said."""

    choices: dict[int, StreamedText] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    comments: int = 0
    chunks: list[dict[str, Any]] = field(default_factory=list)


def validate_text_stream(
    body: bytes, *, include_usage: bool = False, continuous_usage: bool = False
) -> ValidTextStream:
    """Read a whole stream.

    Args:
        body: Everything after the response's headers.
        include_usage: Whether the call asked for usage.
        continuous_usage: Whether it asked for usage with every chunk.

    Raises:
        AssertionError: Naming what is wrong.
    """
    payloads, comments = split_frames(body)
    result = ValidTextStream(comments=comments)
    has_usage = include_usage or continuous_usage
    *frames, last = payloads
    for payload in frames:
        _read_frame(result, json.loads(payload), has_usage=has_usage)
        assert result.error is None, "an error frame is the last"
    if last != "[DONE]":
        result.error = check_error(json.loads(last))
        assert not all(choice.finish_reason for choice in result.choices.values()) or not result.choices
        return result
    assert result.choices, "no choice"
    for choice in result.choices.values():
        assert choice.finish_reason in FINISH_REASONS, f"finish_reason {choice.finish_reason!r}"
        assert len({len(values) for values in choice.logprobs.values()}) == 1, "one place for each token"
    assert (result.usage is not None) == include_usage, "usage exactly when asked for"
    return result


def _read_frame(result: ValidTextStream, frame: dict[str, Any], *, has_usage: bool) -> None:
    assert set(frame) == CHUNK_KEYS | ({"usage"} if has_usage else set()), f"chunk keys: {sorted(frame)}"
    assert frame["object"] == "text_completion"
    for key in ("id", "created", "model", "system_fingerprint"):
        assert not result.chunks or frame[key] == result.chunks[0][key], f"{key} changed within the stream"
    result.chunks.append(frame)
    assert result.usage is None, "chunk after the usage chunk"
    if not frame["choices"]:
        CompletionUsage.model_validate(frame["usage"], strict=True)
        result.usage = frame["usage"]
        return
    (choice,) = frame["choices"]
    assert set(choice) - CHOICE_EXTRAS == CHOICE_KEYS, f"choice keys: {sorted(choice)}"
    _check_types(frame, choice)
    _read_choice(result, choice)


def _check_types(frame: dict[str, Any], choice: dict[str, Any]) -> None:
    """With values in place of those nulls that OpenAI's types do not know of."""
    logprobs = choice["logprobs"]
    if logprobs is not None:
        assert set(logprobs) == set(LOGPROB_KEYS)
        numbers = [0.0 if value is None else value for value in logprobs["token_logprobs"]]
        logprobs = {
            **logprobs,
            "token_logprobs": numbers,
            "top_logprobs": [top or {} for top in logprobs["top_logprobs"]],
        }
    known = {**choice, "finish_reason": choice["finish_reason"] or "stop", "logprobs": logprobs}
    Completion.model_validate({**frame, "choices": [known]}, strict=True)


def _read_choice(result: ValidTextStream, choice: dict[str, Any]) -> None:
    index = choice["index"]
    if index not in result.choices:
        assert index == len(result.choices), "choices appear in the order of their indices"
        result.choices[index] = StreamedText()
    held = result.choices[index]
    assert held.finish_reason is None, "choice after its finish_reason"
    if choice["finish_reason"] is not None:
        assert choice["text"] == "", "the last frame has no text"
    held.text += choice["text"]
    held.finish_reason, held.stop_reason = choice["finish_reason"], choice.get("stop_reason")
    for key, values in (choice["logprobs"] or {}).items():
        held.logprobs[key] += values
    held.token_ids += choice.get("token_ids", [])
    held.prompt_token_ids += choice.get("prompt_token_ids", [])
