"""The bodies of ``POST /v1/messages`` and ``/v1/messages/count_tokens``: bytes in, a checked request out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.chat_request import AnswerAsked, ChatRequest, FormatAsked, SamplingAsked, TemplateAsked, Tool, ToolsAsked
from gateway.messages.conversation import TOOL_NAME_CHARS_MAX, read_conversation, read_tool_definition
from gateway.messages.parameters import EFFORTS, TABLE
from gateway.openai_errors import invalid_value, missing, quoted
from gateway.openai_fields import check_integer, read_boolean, read_integer, read_number, read_positive_number
from gateway.openai_messages import ChatMessage
from gateway.openai_schema import decode_object
from gateway.openai_tools import TOOLS_MAX
from gateway.sampling_schema import TOKENS_MAX, read_stop
from gateway.value_checks import (
    check_array,
    check_choice,
    check_function_name,
    check_object,
    read_model,
    required,
)

TEMPERATURE_MAX = 1.0
BUDGET_TOKENS_MIN = 1024
"""As Anthropic's specification has it."""

_MODES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest:
    """One call.

    Args:
        chat: What is to be generated.
        shows_thinking: Whether thinking is part of the answer.
    """

    chat: ChatRequest
    shows_thinking: bool


def read_message_request(data: bytes, *, counts_only: bool = False) -> MessageRequest:
    """Decode and check a body.

    Args:
        data: The body.
        counts_only: Nothing is to be generated, so `max_tokens` may be absent.

    Raises:
        ApiError: 400 that names the parameter at fault.
    """
    body = decode_object(data)
    model = read_model(body)
    unknown = TABLE.check(body)
    messages = read_conversation(body)
    max_tokens = read_integer(body, "max_tokens", 1, TOKENS_MAX)
    if max_tokens is None and not counts_only:
        raise missing("max_tokens")
    shows_thinking, template = _read_template(body, messages)
    chat = ChatRequest(
        model=model,
        messages=messages,
        sampling=SamplingAsked(
            temperature=read_number(body, "temperature", 0.0, TEMPERATURE_MAX),
            top_p=read_positive_number(body, "top_p", 1.0, hint="; use temperature 0 for greedy answers"),
            top_k=read_integer(body, "top_k", 0, TOKENS_MAX),
        ),
        answer=AnswerAsked(
            max_tokens=max_tokens,
            max_tokens_is_bound=True,
            stop=read_stop(body.get("stop_sequences"), "stop_sequences"),
        ),
        tools=_read_tools(body),
        format=_read_format(body),
        template=template,
        stream=read_boolean(body, "stream"),
        unknown=unknown,
    )
    return MessageRequest(chat=chat, shows_thinking=shows_thinking)


def _read_template(body: Mapping[str, object], messages: Sequence[ChatMessage]) -> tuple[bool, TemplateAsked]:
    """Whether thinking is shown, and how the prompt is made."""
    shows_thinking, thinks = _read_thinking(body.get("thinking"))
    kwargs: dict[str, object] = {"enable_thinking": thinks}
    effort = _output_config(body).get("effort")
    if effort is not None:
        kwargs["reasoning_effort"] = check_choice(effort, "output_config.effort", EFFORTS)
    continues = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    return shows_thinking, TemplateAsked(
        kwargs=kwargs, add_generation_prompt=not continues, continue_final_message=continues
    )


def _read_thinking(value: object) -> tuple[bool, bool]:
    """Whether thinking is shown, and whether there is any."""
    if value is None:
        return False, False
    thinking = check_object(value, "thinking")
    kind = required(thinking, "type", "thinking.type")
    if check_choice(kind, "thinking.type", ("enabled", "adaptive", "disabled")) == "disabled":
        return False, False
    path = "thinking.budget_tokens"
    if kind == "enabled":
        check_integer(path, required(thinking, "budget_tokens", path), BUDGET_TOKENS_MIN, TOKENS_MAX)
    display = thinking.get("display")
    if display is not None:
        check_choice(display, "thinking.display", ("summarized", "omitted"))
    return display != "omitted", True


def _output_config(body: Mapping[str, object]) -> dict[str, Any]:
    value = body.get("output_config")
    return {} if value is None else check_object(value, "output_config")


def _read_format(body: Mapping[str, object]) -> FormatAsked:
    path, value = "output_config.format", _output_config(body).get("format")
    if value is None:
        path, value = "output_format", body.get("output_format")
    if value is None:
        return FormatAsked()
    asked = check_object(value, path)
    check_choice(required(asked, "type", f"{path}.type"), f"{path}.type", ("json_schema",))
    schema = check_object(required(asked, "schema", f"{path}.schema"), f"{path}.schema")
    return FormatAsked(kind="json_schema", value=schema, param=f"{path}.schema")


def _read_tools(body: Mapping[str, object]) -> ToolsAsked:
    value = body.get("tools")
    found = [] if value is None else check_array(value, "tools", items_max=TOOLS_MAX)
    tools = tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(found))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid_value("tools", "two tools have the same name")
    given = body.get("tool_choice")
    choice = {"type": "auto"} if given is None else check_object(given, "tool_choice")
    kind = check_choice(required(choice, "type", "tool_choice.type"), "tool_choice.type", tuple(_MODES))
    mode = _MODES[kind]
    if mode == "required" and not tools:
        raise invalid_value("tool_choice", "a call is required, but there are no tools")
    path = "tool_choice.disable_parallel_tool_use"
    return ToolsAsked(
        tools=tools,
        mode=mode if tools else "none",  # type: ignore[arg-type]  # one of `_MODES`
        allowed=(_read_named(choice, names),) if kind == "tool" else (),
        is_named=kind == "tool",
        parallel=not read_boolean(choice, "disable_parallel_tool_use", path=path),
    )


def _read_named(choice: Mapping[str, object], names: Sequence[str]) -> str:
    name = check_function_name(choice.get("name"), "tool_choice.name", chars_max=TOOL_NAME_CHARS_MAX)
    if name not in names:
        raise invalid_value("tool_choice.name", f"{quoted(name)} is not one of the tools")
    return name


def _read_tool(value: object, path: str) -> Tool:
    tool = check_object(value, path)
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise invalid_value(f"{path}.type", f"{quoted(kind)} tools are not supported by this server, only your own")
    name = check_function_name(tool.get("name"), f"{path}.name", chars_max=TOOL_NAME_CHARS_MAX)
    definition = read_tool_definition(tool, path, name)
    strict = read_boolean(tool, "strict", path=f"{path}.strict")
    return Tool(name=name, parameters=tool["input_schema"], strict=strict, definition=definition)
