"""The `messages` of a chat completion: checked, and brought into the form that chat templates read.

A template sees dicts with `role` and `content` (a string, or text parts, which `gateway.chat_template` joins where
the template takes strings), and for histories of tool calls also `tool_calls` (arguments decoded, as templates
expect), `tool_call_id`, `name` and `reasoning_content`. What a template makes of a role is its own affair: its
refusal comes back as a 400 with its own words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.json_fault import describe_fault
from gateway.openai_errors import ApiError, invalid_type, invalid_value, missing, quoted, unsupported

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
"""`function` is the older name of `tool`: it names the function instead of the call."""
MESSAGES_MAX = 10_000
"""More messages than any context holds turns for."""

ChatMessage = dict[str, Any]


def read_messages(value: object) -> list[ChatMessage]:
    """Check and normalize.

    Raises:
        ApiError: 400 whose `param` is the path of what is wrong, such as ``messages[2].content[0].text``.
    """
    if not isinstance(value, list):
        raise invalid_type("messages", "an array of objects", value)
    if not value:
        raise invalid_value("messages", "at least one message is required", code="empty_array")
    if len(value) > MESSAGES_MAX:
        raise invalid_value("messages", f"at most {MESSAGES_MAX} messages")
    return [_read_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _read_message(item: object, path: str) -> ChatMessage:
    if not isinstance(item, dict):
        raise invalid_type(path, "an object", item)
    role = item.get("role")
    if role is None:
        raise missing(f"{path}.role")
    if role not in ROLES:
        raise invalid_value(f"{path}.role", f"{quoted(role)} is not one of {', '.join(ROLES)}")
    message: ChatMessage = {"role": role, "content": _read_content(item, role, path)}
    if item.get("audio") is not None:
        raise unsupported(f"{path}.audio", "this server reads and writes text only")
    for name, read in _OPTIONAL_FIELDS[role].items():
        if item.get(name) is not None:
            message[name] = read(item[name], f"{path}.{name}")
    for name in _REQUIRED_FIELDS.get(role, ()):
        if name not in message:
            raise missing(f"{path}.{name}")
    return _modernized(message)


def _modernized(message: ChatMessage) -> ChatMessage:
    """Older names of the same things, as templates know them."""
    if message["role"] == "function":
        message["role"] = "tool"
    if "reasoning" in message:
        message.setdefault("reasoning_content", message.pop("reasoning"))
    if "function_call" in message:
        message.setdefault("tool_calls", [message.pop("function_call")])
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    return message


def _read_content(item: dict[str, object], role: str, path: str) -> str | list[dict[str, Any]]:
    content = item.get("content")
    if content is None:
        if role != "assistant":
            raise missing(f"{path}.content") if "content" not in item else _no_content(path)
        content = item.get("refusal") or ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_type(f"{path}.content", "a string or an array of text parts", content)
    return [
        {"type": "text", "text": _read_part(part, f"{path}.content[{index}]")} for index, part in enumerate(content)
    ]


def _no_content(path: str) -> ApiError:
    return invalid_type(f"{path}.content", "a string or an array of text parts", None)


def _read_part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise invalid_type(path, "an object", part)
    kind = part.get("type")
    if kind is None:
        raise missing(f"{path}.type")
    if kind not in ("text", "refusal"):
        raise invalid_value(f"{path}.type", f"{quoted(kind)} parts are not supported: this model takes text only")
    text = part.get(kind)
    if text is None:
        raise missing(f"{path}.{kind}")
    return _read_string(text, f"{path}.{kind}")


def _read_string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise invalid_type(path, "a string", value)
    return value


def _read_tool_calls(value: object, path: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise invalid_type(path, "an array of objects", value)
    return [_read_tool_call(call, f"{path}[{index}]") for index, call in enumerate(value)]


def _read_tool_call(call: object, path: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise invalid_type(path, "an object", call)
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid_type(f"{path}.function", "an object", function)
    return {"id": _read_string(call.get("id"), f"{path}.id"), **_read_function(function, f"{path}.function")}


def _read_function_call(function: object, path: str) -> dict[str, Any]:
    """The older form of a call, which has no id."""
    if not isinstance(function, dict):
        raise invalid_type(path, "an object", function)
    return {"id": "", **_read_function(function, path)}


def _read_function(function: dict[str, Any], path: str) -> dict[str, Any]:
    name = _read_string(function.get("name"), f"{path}.name")
    arguments = _read_string(function.get("arguments", ""), f"{path}.arguments")
    decoded = decode_arguments(arguments, f"{path}.arguments")
    return {"type": "function", "function": {"name": name, "arguments": decoded}}


def decode_arguments(arguments: str, path: str) -> dict[str, Any]:
    """The arguments of a call in a history, as chat templates expect them; none for an empty string.

    Raises:
        ApiError: 400.
    """
    if not arguments.strip():
        return {}
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid_value(path, f"not valid JSON ({describe_fault(arguments.encode(), error)})") from error
    if not isinstance(decoded, dict):
        raise invalid_type(path, "a string that holds a JSON object", decoded)
    return decoded


_NAMED: dict[str, Callable[[object, str], object]] = {"name": _read_string}
_OPTIONAL_FIELDS: dict[str, dict[str, Callable[[object, str], object]]] = {
    "developer": _NAMED,
    "system": _NAMED,
    "user": _NAMED,
    "assistant": {
        **_NAMED,
        "tool_calls": _read_tool_calls,
        "function_call": _read_function_call,
        "reasoning_content": _read_string,
        "reasoning": _read_string,
    },
    "tool": {**_NAMED, "tool_call_id": _read_string},
    "function": _NAMED,
}
_REQUIRED_FIELDS = {"tool": ("tool_call_id",), "function": ("name",)}
