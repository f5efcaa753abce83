"""The body of ``POST /v1/responses``: bytes in, a checked `ResponseRequest` or an `ApiError` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.chat_request import ChatRequest, FormatAsked, TemplateAsked
from gateway.openai_errors import invalid_value, quoted
from gateway.openai_fields import read_boolean, read_integer, read_object, read_string
from gateway.openai_schema import decode_object
from gateway.parameter_table import refuse_unless_neutral
from gateway.responses.conversation import to_messages
from gateway.responses.items import Item, read_input
from gateway.responses.parameters import EFFORTS, INCLUDE_LOGPROBS, INCLUDES, TABLE, VERBOSITIES
from gateway.responses.store import ResponseStore
from gateway.responses.tools import echo_tool, read_tools
from gateway.sampling_schema import TOKENS_MAX, TOP_LOGPROBS_MAX, read_answer, read_sampling
from gateway.value_checks import (
    ID_CHARS_MAX,
    check_array,
    check_choice,
    check_function_name,
    check_object,
    read_metadata,
    read_model,
    required,
)

INCLUDES_MAX = 32
"""More than there are names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """One call.

    Args:
        chat: What is to be generated.
        items: The input of this call alone, to be stored with the response.
        store: Whether to keep the response.
        echo: The keys of the response that repeat the request.
        has_logprobs: Whether the text comes with log-probabilities.
    """

    chat: ChatRequest
    items: tuple[Item, ...]
    store: bool
    echo: Mapping[str, object]
    has_logprobs: bool


def read_response_request(data: bytes, store: ResponseStore) -> ResponseRequest:
    """Decode and check a body.

    Args:
        data: The body.
        store: Has what the body refers to.

    Raises:
        ApiError: 400 that names the parameter at fault; 404 for a previous response that is not there.
    """
    body = decode_object(data)
    model = read_model(body)
    unknown = TABLE.check(body)
    previous_id = read_string(body, "previous_response_id", chars_max=ID_CHARS_MAX) or None
    instructions = read_string(body, "instructions")
    items = read_input(required(body, "input", "input"), store.find_item)
    before = store.context(previous_id) if previous_id else []
    logprobs = _read_logprobs(body)
    chat = ChatRequest(
        model=model,
        messages=to_messages([*before, *items], instructions),
        sampling=read_sampling(body),
        answer=read_answer(body, logprobs=logprobs, limit_names=("max_output_tokens",)),
        tools=read_tools(body),
        format=_read_text(body.get("text")),
        template=TemplateAsked(kwargs=_read_reasoning(body.get("reasoning"))),
        stream=read_boolean(body, "stream"),
        unknown=unknown,
    )
    keeps = read_boolean(body, "store", default=True)
    return ResponseRequest(
        chat=chat,
        items=tuple(items),
        store=keeps,
        echo={**_echo(body, chat), "store": keeps, "previous_response_id": previous_id},
        has_logprobs=logprobs is not None,
    )


def _echo(body: Mapping[str, object], chat: ChatRequest) -> dict[str, object]:
    """What a response repeats of a body that `chat` was read from."""
    reasoning: Mapping[str, object] = read_object(body, "reasoning") or {}
    choice = body.get("tool_choice")
    return {
        "instructions": body.get("instructions"),
        "tools": [echo_tool(tool) for tool in chat.tools.tools],
        "tool_choice": "auto" if choice is None else choice,
        "parallel_tool_calls": chat.tools.parallel,
        "text": _echo_text(read_object(body, "text") or {}),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "max_output_tokens": chat.answer.max_tokens,
        "max_tool_calls": read_integer(body, "max_tool_calls", 1, TOKENS_MAX),
        "top_logprobs": chat.answer.logprobs or 0,
        "presence_penalty": chat.sampling.presence_penalty or 0.0,
        "frequency_penalty": chat.sampling.frequency_penalty or 0.0,
        "truncation": "disabled",
        "background": False,
        "service_tier": "default",
        "metadata": read_metadata(body.get("metadata")),
        "safety_identifier": body.get("safety_identifier"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "user": body.get("user"),
    }


def _read_logprobs(body: Mapping[str, object]) -> int | None:
    """How many alternatives to each token are asked for; None for no log-probabilities at all."""
    value = body.get("include")
    include = [] if value is None else check_array(value, "include", items_max=INCLUDES_MAX)
    check_include(include)
    top_logprobs = read_integer(body, "top_logprobs", 0, TOP_LOGPROBS_MAX) or 0
    return top_logprobs if INCLUDE_LOGPROBS in include or top_logprobs else None


def check_include(names: Sequence[object]) -> None:
    """What a response is to include beside what it always does.

    Raises:
        ApiError: 400 for what it cannot.
    """
    for index, name in enumerate(names):
        if name not in INCLUDES:
            known = ", ".join(INCLUDES)
            raise invalid_value(f"include[{index}]", f"{quoted(name)} is not supported by this server, only {known}")


def _read_text(value: object) -> FormatAsked:
    text = {} if value is None else check_object(value, "text")
    if text.get("verbosity") is not None:
        check_choice(text["verbosity"], "text.verbosity", VERBOSITIES)
    given = text.get("format")
    return FormatAsked() if given is None else _read_format(check_object(given, "text.format"))


def _read_format(given: Mapping[str, Any]) -> FormatAsked:
    path = "text.format"
    kind = required(given, "type", f"{path}.type")
    match check_choice(kind, f"{path}.type", ("text", "json_object", "json_schema")):
        case "text":
            return FormatAsked()
        case "json_object":
            return FormatAsked(kind="json_object", param=path)
    check_function_name(given.get("name"), f"{path}.name")
    read_string(given, "description", path=f"{path}.description")
    read_boolean(given, "strict", path=f"{path}.strict")
    schema = check_object(required(given, "schema", f"{path}.schema"), f"{path}.schema")
    if schema.get("type", "object") != "object":
        raise invalid_value(f"{path}.schema", "expected a schema of type 'object'")
    return FormatAsked(kind="json_schema", value=schema, param=f"{path}.schema")


def _echo_text(text: Mapping[str, Any]) -> dict[str, object]:
    """`text` with what it leaves open filled in."""
    given = text.get("format") or {"type": "text"}
    shown: dict[str, object] = {"type": given["type"]}
    if given["type"] == "json_schema":
        shown |= {"name": given["name"], "description": given.get("description"), "schema": given["schema"]}
        shown["strict"] = bool(given.get("strict"))
    return {"format": shown, "verbosity": text.get("verbosity") or "medium"}


def _read_reasoning(value: object) -> dict[str, object]:
    """Variables of the chat template."""
    reasoning = {} if value is None else check_object(value, "reasoning")
    for name in ("summary", "generate_summary", "context", "mode"):
        path = f"reasoning.{name}"
        refuse_unless_neutral(path, reasoning.get(name), TABLE.refused[path])
    effort = reasoning.get("effort")
    return {} if effort is None else effort_kwargs(check_choice(effort, "reasoning.effort", EFFORTS))


def effort_kwargs(effort: str) -> dict[str, object]:
    """How much reasoning is wanted, under both of the names that chat templates read."""
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}
