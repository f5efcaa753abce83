"""The body of ``POST /v1/chat/completions``: bytes in, a checked `ChatRequest` or an `ApiError` out."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.chat_request import AnswerAsked, ChatRequest, SamplingAsked
from gateway.json_fault import describe_fault
from gateway.openai_errors import ApiError, invalid_type, invalid_value, missing, quoted
from gateway.openai_messages import ChatMessage, read_messages
from gateway.openai_parameters import STREAM_OPTIONS_REFUSED, check_parameters, refuse_unless_neutral

TEMPERATURE_MAX = 2.0
STOPS_MAX = 16
STOP_CHARS_MAX = 500
"""Bounds the text that is held back, and the automaton that looks for it."""
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
TOKENS_MAX = 2**31 - 1
MODEL_CHARS_MAX = 512


def read_chat_request(data: bytes) -> ChatRequest:
    """Decode and check a body.

    Raises:
        ApiError: 400 that names the parameter at fault.
    """
    body = decode_object(data)
    model = _read_model(body)
    messages = _read_required_messages(body)
    unknown = check_parameters(body)
    max_tokens_param = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    older_limit = _read_integer(body, "max_tokens", 1, TOKENS_MAX)
    limit = _read_integer(body, "max_completion_tokens", 1, TOKENS_MAX)
    stream = _read_boolean(body, "stream", "stream")
    return ChatRequest(
        model=model,
        messages=messages,
        sampling=SamplingAsked(
            temperature=_read_number(body, "temperature", 0.0, TEMPERATURE_MAX),
            top_p=_read_top_p(body),
            seed=_read_integer(body, "seed", SEED_MIN, SEED_MAX),
        ),
        answer=AnswerAsked(
            stop=_read_stop(body.get("stop")),
            max_tokens=older_limit if limit is None else limit,
            max_tokens_param=max_tokens_param,
        ),
        stream=stream,
        include_usage=_read_stream_options(body.get("stream_options"), stream=stream),
        unknown=unknown,
    )


def decode_object(data: bytes) -> dict[str, object]:
    """Decode a JSON object; strict UTF-8, no NaN, no lone surrogates, bounded depth.

    Raises:
        ApiError: 400.
    """
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        message = f"We could not parse the JSON body of your request: {describe_fault(data, error)}."
        raise ApiError(400, message, code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "The body of your request must be a JSON object.", code="invalid_json")
    return body


def _read_model(body: Mapping[str, object]) -> str:
    model = body.get("model")
    if model is None:
        raise missing("model")
    if not isinstance(model, str):
        raise invalid_type("model", "a string", model)
    if not model or len(model) > MODEL_CHARS_MAX:
        raise invalid_value("model", f"expected 1 to {MODEL_CHARS_MAX} characters")
    return model


def _read_required_messages(body: Mapping[str, object]) -> list[ChatMessage]:
    if "messages" not in body:
        raise missing("messages")
    return read_messages(body["messages"])


def _read_number(body: Mapping[str, object], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid_type(name, "a number", value)
    if not low <= value <= high:
        raise invalid_value(name, f"expected {low:g} to {high:g}, got {quoted(value)}")
    return float(value)


def _read_top_p(body: Mapping[str, object]) -> float | None:
    top_p = _read_number(body, "top_p", 0.0, 1.0)
    if top_p == 0:
        raise invalid_value("top_p", "expected more than 0 and at most 1, got 0; use temperature 0 for greedy answers")
    return top_p


def _read_integer(body: Mapping[str, object], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_type(name, "an integer", value)
    if not low <= value <= high:
        raise invalid_value(name, f"expected an integer from {low} to {high}, got {quoted(value)}")
    return value


def _read_boolean(body: Mapping[str, object], name: str, path: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid_type(path, "a boolean", value)
    return bool(value)


def _read_stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise invalid_type("stop", "a string or an array of strings", value)
    if len(stops) > STOPS_MAX:
        raise invalid_value("stop", f"at most {STOPS_MAX} stop strings, got {len(stops)}")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise invalid_type(f"stop[{index}]", "a string", stop)
        if not 1 <= len(stop) <= STOP_CHARS_MAX:
            raise invalid_value("stop", f"a stop string has 1 to {STOP_CHARS_MAX} characters, one has {len(stop)}")
    return tuple(dict.fromkeys(stops))


def _read_stream_options(value: object, *, stream: bool) -> bool:
    """Whether a usage chunk was asked for."""
    if value is None:
        return False
    if not isinstance(value, dict):
        raise invalid_type("stream_options", "an object", value)
    if not stream:
        raise invalid_value("stream_options", "only allowed when stream is true")
    for name, refused in STREAM_OPTIONS_REFUSED.items():
        refuse_unless_neutral(f"stream_options.{name}", value.get(name), refused)
    return _read_boolean(value, "include_usage", "stream_options.include_usage")
