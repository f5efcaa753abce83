"""`tools` and `tool_choice` of a response: functions that the model may, or must, call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.chat_request import Tool, ToolsAsked
from gateway.openai_errors import invalid_value, quoted
from gateway.openai_fields import read_boolean, read_string
from gateway.openai_tools import TOOLS_MAX
from gateway.value_checks import check_array, check_choice, check_function_name, check_object, required

MODES = ("none", "auto", "required")


def read_tools(body: Mapping[str, object]) -> ToolsAsked:
    """Check both.

    Raises:
        ApiError: 400.
    """
    value = body.get("tools")
    found = [] if value is None else check_array(value, "tools", items_max=TOOLS_MAX)
    tools = tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(found))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid_value("tools", "two functions have the same name")
    parallel = read_boolean(body, "parallel_tool_calls", default=True)
    choice = body.get("tool_choice")
    choice = "auto" if choice is None else choice
    if isinstance(choice, str):
        mode = check_choice(choice, "tool_choice", MODES)
        allowed: tuple[str, ...] = ()
    else:
        mode, allowed = _read_choice_object(check_object(choice, "tool_choice"), names)
    if mode == "required" and not tools:
        raise invalid_value("tool_choice", "a call is required, but there are no tools")
    return ToolsAsked(
        tools=tools,
        mode=mode if tools else "none",  # type: ignore[arg-type]  # one of `MODES`
        allowed=allowed,
        is_named=isinstance(choice, dict) and choice.get("type") == "function",
        parallel=parallel,
    )


def echo_tool(tool: Tool) -> dict[str, object]:
    """A tool as a response repeats it."""
    function: Mapping[str, Any] = tool.definition["function"]
    return {
        "type": "function",
        "name": tool.name,
        "description": function.get("description"),
        "parameters": function.get("parameters"),
        "strict": tool.strict,
    }


def _read_tool(value: object, path: str) -> Tool:
    tool = check_object(value, path)
    _check_kind(required(tool, "type", f"{path}.type"), f"{path}.type")
    name = check_function_name(tool.get("name"), f"{path}.name")
    function: dict[str, object] = {"name": name}
    description = read_string(tool, "description", path=f"{path}.description")
    if description is not None:
        function["description"] = description
    parameters = tool.get("parameters")
    if parameters is not None:
        function["parameters"] = check_object(parameters, f"{path}.parameters")
    return Tool(
        name=name,
        parameters=check_object(parameters or {}, f"{path}.parameters"),
        strict=read_boolean(tool, "strict", path=f"{path}.strict"),
        definition={"type": "function", "function": function},
    )


def _check_kind(kind: object, path: str) -> None:
    if kind != "function":
        raise invalid_value(path, f"{quoted(kind)} tools are not supported by this server, only functions")


def _read_choice_object(choice: Mapping[str, Any], names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    kind = required(choice, "type", "tool_choice.type")
    if kind == "allowed_tools":
        mode = check_choice(required(choice, "mode", "tool_choice.mode"), "tool_choice.mode", ("auto", "required"))
        tools = check_array(required(choice, "tools", "tool_choice.tools"), "tool_choice.tools", items_max=TOOLS_MAX)
        allowed = [_read_named(tool, f"tool_choice.tools[{index}]", names) for index, tool in enumerate(tools)]
        if not allowed:
            raise invalid_value("tool_choice.tools", "at least one tool is required", code="empty_array")
        return mode, tuple(dict.fromkeys(allowed))
    return "required", (_read_named(choice, "tool_choice", names),)


def _read_named(value: object, path: str, names: Sequence[str]) -> str:
    tool = check_object(value, path)
    _check_kind(required(tool, "type", f"{path}.type"), f"{path}.type")
    name = check_function_name(tool.get("name"), f"{path}.name")
    if name not in names:
        raise invalid_value(f"{path}.name", f"{quoted(name)} is not one of the tools")
    return name
