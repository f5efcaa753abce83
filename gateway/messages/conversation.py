"""The `messages` and `system` of Anthropic's API: checked, and brought into the form that chat templates read.

A user's text and the results of tools come in one message there and are several here: a `tool` message for each
result. Neighbouring turns of one role are one turn, as Anthropic has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gateway.openai_errors import invalid_type, invalid_value, quoted, unsupported
from gateway.openai_fields import read_boolean, read_string
from gateway.openai_messages import MESSAGES_MAX, ChatMessage
from gateway.value_checks import (
    ID_CHARS_MAX,
    check_array,
    check_choice,
    check_function_name,
    check_object,
    check_string,
    required,
)

ROLES = ("user", "assistant", "system")
BLOCKS_MAX = 10_000
"""Of one message; as many as a call may have messages."""
TOOL_NAME_CHARS_MAX = 128
"""As Anthropic's specification has it."""
TOOL_ERROR = "Error: "
"""What tells a model that a tool has failed: chat templates have no other place for it."""

Block = Mapping[str, Any]


def read_conversation(body: Mapping[str, object]) -> list[ChatMessage]:
    """Check and normalize.

    Raises:
        ApiError: 400 whose `param` is the path of what is wrong, such as ``messages[2].content[0].text``.
    """
    conversation = _Conversation()
    system = body.get("system")
    if system is not None:
        conversation.messages.append({"role": "system", "content": read_text(system, "system")})
    messages = check_array(required(body, "messages", "messages"), "messages", items_max=MESSAGES_MAX)
    if not messages:
        raise invalid_value("messages", "at least one message is required", code="empty_array")
    before = len(conversation.messages)
    for index, value in enumerate(messages):
        conversation.read_message(value, f"messages[{index}]")
    if len(conversation.messages) == before:
        raise invalid_value("messages", "at least one block of content is required", code="empty_array")
    return conversation.messages


def read_text(value: object, path: str) -> str:
    """A string, or the texts of blocks joined by line breaks.

    Raises:
        ApiError: 400.
    """
    return "\n".join(_text_of(block, here, "text") for block, here in _blocks(value, path))


def _blocks(value: object, path: str) -> list[tuple[Block, str]]:
    if isinstance(value, str):
        return [({"type": "text", "text": value}, path)]
    if not isinstance(value, list):
        raise invalid_type(path, "a string or an array of blocks", value)
    blocks = check_array(value, path, items_max=BLOCKS_MAX)
    return [(check_object(block, f"{path}[{index}]"), f"{path}[{index}]") for index, block in enumerate(blocks)]


def _text_of(block: Block, path: str, *kinds: str) -> str:
    kind = required(block, "type", f"{path}.type")
    if kind not in kinds:
        raise invalid_value(f"{path}.type", f"{quoted(kind)} blocks are not supported here: this model takes text only")
    return check_string(required(block, "text", f"{path}.text"), f"{path}.text")


class _Conversation:
    """Messages so far."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._names: dict[str, str] = {}

    def read_message(self, value: object, path: str) -> None:
        message = check_object(value, path)
        role = check_choice(required(message, "role", f"{path}.role"), f"{path}.role", ROLES)
        content = required(message, "content", f"{path}.content")
        readers = self._readers(role)
        for block, here in _blocks(content, f"{path}.content"):
            kind = required(block, "type", f"{here}.type")
            read = readers.get(kind) if isinstance(kind, str) else None
            if read is None:
                known = ", ".join(readers)
                problem = f"{quoted(kind)} blocks are not supported from {role}, only {known}"
                raise invalid_value(f"{here}.type", problem)
            read(block, here)

    def _readers(self, role: str) -> dict[str, Callable[[Block, str], None]]:
        def read_text_block(block: Block, path: str) -> None:
            self._add_text(role, _text_of(block, path, "text"))

        if role == "assistant":
            return {
                "text": read_text_block,
                "tool_use": self._read_tool_use,
                "thinking": self._read_thinking,
                "redacted_thinking": _refuse_redacted,
            }
        if role == "user":
            return {"text": read_text_block, "tool_result": self._read_result}
        return {"text": read_text_block}

    def _turn(self, role: str) -> ChatMessage:
        """The last message if it is of this role, else a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]

    def _add_text(self, role: str, text: str) -> None:
        turn = self._turn(role)
        turn["content"] = f"{turn['content']}\n{text}" if turn["content"] else text

    def _read_thinking(self, block: Block, path: str) -> None:
        text = check_string(required(block, "thinking", f"{path}.thinking"), f"{path}.thinking")
        turn = self._turn("assistant")
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def _read_tool_use(self, block: Block, path: str) -> None:
        call_id = check_string(required(block, "id", f"{path}.id"), f"{path}.id", chars_max=ID_CHARS_MAX, chars_min=1)
        name = check_function_name(block.get("name"), f"{path}.name", chars_max=TOOL_NAME_CHARS_MAX)
        arguments = check_object(required(block, "input", f"{path}.input"), f"{path}.input")
        self._names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn("assistant").setdefault("tool_calls", []).append(call)

    def _read_result(self, block: Block, path: str) -> None:
        call_id = required(block, "tool_use_id", f"{path}.tool_use_id")
        name = self._names.get(check_string(call_id, f"{path}.tool_use_id", chars_max=ID_CHARS_MAX))
        if name is None:
            raise invalid_value(f"{path}.tool_use_id", f"there is no tool_use {quoted(call_id)} before its result")
        content = block.get("content")
        text = "" if content is None else read_text(content, f"{path}.content")
        if read_boolean(block, "is_error", path=f"{path}.is_error"):
            text = TOOL_ERROR + text
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": text})


def _refuse_redacted(_block: Block, path: str) -> None:
    raise unsupported(path, "only the server that redacted this thinking can read it")


def read_tool_definition(tool: Mapping[str, Any], path: str, name: str) -> dict[str, object]:
    """A tool as chat templates read it.

    Raises:
        ApiError: 400.
    """
    function: dict[str, object] = {"name": name}
    description = read_string(tool, "description", path=f"{path}.description")
    if description is not None:
        function["description"] = description
    schema = required(tool, "input_schema", f"{path}.input_schema")
    function["parameters"] = check_object(schema, f"{path}.input_schema")
    return {"type": "function", "function": function}
