"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat completion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.chat_request import Tool, ToolMode, ToolsAsked
from gateway.openai_errors import invalid_type, invalid_value, missing, quoted
from gateway.openai_fields import Body, read_boolean, read_list, read_object, read_string

TOOLS_MAX = 128
"""OpenAI's; more than any model tells apart."""
SCHEMA_BYTES_MAX = 64 * 1024
"""Of a JSON schema, or of all tools' schemas together: what fits into a message between machines, with room."""
DESCRIPTION_CHARS_MAX = 65_536
"""More than a context has room for, with the others."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NAME_RULE = "1 to 64 of A-Z, a-z, 0-9, _ and -"


def read_tools(body: Body) -> ToolsAsked:
    """Which functions may, or must, be called.

    Raises:
        ApiError: 400 that names what is wrong.
    """
    items = read_list(body, "tools", TOOLS_MAX) or []
    tools = tuple(_read_tool(item, f"tools[{index}]") for index, item in enumerate(items))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid_value(f"tools[{index}].function.name", f"there is another tool of the name {name!r}")
    size = _schema_bytes(tools)
    if size > SCHEMA_BYTES_MAX:
        raise invalid_value("tools", f"at most {SCHEMA_BYTES_MAX} bytes of schemas in all, got {size}")
    mode, allowed, is_named = _read_choice(body.get("tool_choice"), names)
    parallel = read_boolean(body, "parallel_tool_calls", default=True)
    return ToolsAsked(tools=tools, mode=mode, allowed=allowed, is_named=is_named, parallel=parallel)


def _schema_bytes(tools: Sequence[Tool]) -> int:
    try:
        return sum(len(msgspec.json.encode(tool.parameters)) for tool in tools)
    except RecursionError as error:
        raise invalid_value("tools", "a schema is nested too deeply") from error


def read_name(body: Body, path: str) -> str:
    """A required `name` that OpenAI would take for a function or a schema.

    Raises:
        ApiError: 400.
    """
    name = read_string(body, "name", path=path)
    if name is None:
        raise missing(path)
    if not TOOL_NAME.fullmatch(name):
        raise invalid_value(path, f"expected {NAME_RULE}, got {quoted(name)}")
    return name


def _read_tool(item: object, path: str) -> Tool:
    if not isinstance(item, dict):
        raise invalid_type(path, "an object", item)
    _check_function_type(item, path)
    function = item.get("function")
    if function is None:
        raise missing(f"{path}.function")
    if not isinstance(function, dict):
        raise invalid_type(f"{path}.function", "an object", function)
    path = f"{path}.function"
    read_string(function, "description", path=f"{path}.description", chars_max=DESCRIPTION_CHARS_MAX)
    parameters = read_object(function, "parameters", path=f"{path}.parameters") or {}
    if parameters.get("type", "object") != "object":
        raise invalid_value(f"{path}.parameters", "expected a schema of type 'object'")
    return Tool(
        name=read_name(function, f"{path}.name"),
        parameters=parameters,
        strict=read_boolean(function, "strict", path=f"{path}.strict"),
        definition=item,
    )


def _check_function_type(item: dict[str, Any], path: str) -> None:
    kind = item.get("type")
    if kind is None:
        raise missing(f"{path}.type")
    if kind != "function":
        raise invalid_value(f"{path}.type", f"{quoted(kind)} is not supported: only 'function' is")


def _read_choice(value: object, names: list[str]) -> tuple[ToolMode, tuple[str, ...], bool]:
    """Mode, allowed names, and whether the caller named the one."""
    if value is None:
        return ("auto" if names else "none"), (), False
    if isinstance(value, dict):
        return _read_choice_object(value, names)
    if not isinstance(value, str):
        raise invalid_type("tool_choice", "a string or an object", value)
    if value == "required":
        if not names:
            raise invalid_value("tool_choice", "'required' is only allowed when there are tools")
        return "required", (), False
    if value not in ("none", "auto"):
        raise invalid_value("tool_choice", f"{quoted(value)} is not one of none, auto, required")
    return ("auto" if value == "auto" and names else "none"), (), False


def _read_choice_object(value: dict[str, Any], names: list[str]) -> tuple[ToolMode, tuple[str, ...], bool]:
    if value.get("type") == "allowed_tools":
        allowed = read_object(value, "allowed_tools", path="tool_choice.allowed_tools")
        if allowed is None:
            raise missing("tool_choice.allowed_tools")
        return _read_allowed(allowed, names)
    return "required", (_read_function_name(value, "tool_choice", names),), True


def _read_allowed(allowed: dict[str, Any], names: list[str]) -> tuple[ToolMode, tuple[str, ...], bool]:
    path = "tool_choice.allowed_tools"
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise invalid_value(f"{path}.mode", f"expected auto or required, got {quoted(mode)}")
    items = read_list(allowed, "tools", TOOLS_MAX, path=f"{path}.tools") or []
    if not items:
        raise invalid_value(f"{path}.tools", "at least one tool is required", code="empty_array")
    chosen = (_read_function_name(item, f"{path}.tools[{index}]", names) for index, item in enumerate(items))
    return ("required" if mode == "required" else "auto"), tuple(dict.fromkeys(chosen)), False


def _read_function_name(item: object, path: str, names: list[str]) -> str:
    if not isinstance(item, dict):
        raise invalid_type(path, "an object", item)
    _check_function_type(item, path)
    function = read_object(item, "function", path=f"{path}.function")
    if function is None:
        raise missing(f"{path}.function")
    name = read_name(function, f"{path}.function.name")
    if name not in names:
        raise invalid_value(f"{path}.function.name", f"there is no tool {name!r} among the tools")
    return name
