"""The body of ``POST /v1/chat/completions``: bytes in, a checked `ChatRequest` or an `ApiError` out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from gateway.chat_request import ChatRequest
from gateway.json_fault import describe_fault
from gateway.openai_errors import ApiError, invalid_type, invalid_value, missing
from gateway.openai_fields import read_boolean, read_integer, read_string
from gateway.openai_format import read_format
from gateway.openai_messages import ChatMessage, read_messages
from gateway.openai_parameters import CHAT, STREAM_OPTIONS_REFUSED
from gateway.openai_template import read_template
from gateway.openai_tools import read_tools
from gateway.parameter_table import refuse_unless_neutral
from gateway.sampling_schema import read_answer, read_chat_logprobs, read_sampling

MODEL_CHARS_MAX = 512
TIER_CHARS_MAX = 64
PRIORITY_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What a stream shows beside the answers.

    Args:
        include_usage: A usage chunk at the end.
        continuous_usage: The usage so far with every chunk.
    """

    include_usage: bool = False
    continuous_usage: bool = False


def read_chat_request(data: bytes) -> ChatRequest:
    """Decode and check a body.

    Raises:
        ApiError: 400 that names the parameter at fault.
    """
    body = decode_object(data)
    model = read_model(body)
    messages = _read_required_messages(body)
    unknown = CHAT.check(body)
    stream = read_boolean(body, "stream")
    options = _read_stream_options(body.get("stream_options"), stream=stream)
    return ChatRequest(
        model=model,
        messages=messages,
        sampling=read_sampling(body),
        answer=read_answer(body, logprobs=read_chat_logprobs(body)),
        tools=read_tools(body),
        format=read_format(body),
        template=read_template(body),
        stream=stream,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage,
        service_tier=read_string(body, "service_tier", chars_max=TIER_CHARS_MAX),
        priority=read_integer(body, "priority", -PRIORITY_MAX, PRIORITY_MAX) or 0,
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


def read_model(body: Mapping[str, object]) -> str:
    """The model's name.

    Raises:
        ApiError: 400, also where there is none.
    """
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


def _read_stream_options(value: object, *, stream: bool) -> StreamOptions:
    if value is None:
        return StreamOptions()
    if not isinstance(value, dict):
        raise invalid_type("stream_options", "an object", value)
    if not stream:
        raise invalid_value("stream_options", "only allowed when stream is true")
    for name, refused in STREAM_OPTIONS_REFUSED.items():
        refuse_unless_neutral(f"stream_options.{name}", value.get(name), refused)
    return StreamOptions(
        include_usage=read_boolean(value, "include_usage", path="stream_options.include_usage"),
        continuous_usage=read_boolean(value, "continuous_usage_stats", path="stream_options.continuous_usage_stats"),
    )
