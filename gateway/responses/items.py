"""Items of a response's input: checked, and brought into the form in which they are stored and listed.

An item is a dict as the API writes it: with `type`, `id` and `status`, and `content` always a list of parts.
`gateway.responses.conversation` makes messages of items.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from gateway.openai_errors import ApiError, invalid_type, invalid_value, missing, quoted, unsupported
from gateway.openai_fields import read_string
from gateway.openai_messages import MESSAGES_MAX, decode_arguments
from gateway.value_checks import (
    ID_CHARS_MAX,
    check_array,
    check_choice,
    check_function_name,
    check_object,
    check_string,
    required,
)

ITEM_ID_BYTES = 24
PARTS_MAX = 10_000
"""Of one message; as many as a call may have messages."""
ROLES = ("user", "system", "developer", "assistant")
STATUSES = ("in_progress", "completed", "incomplete")

Item = dict[str, Any]
FindItem = Callable[[str], Item | None]


def mint_item_id(prefix: str) -> str:
    """A fresh id for an item: ``msg_…``, ``fc_…``, ``fco_…``, ``rs_…``."""
    return f"{prefix}_{secrets.token_hex(ITEM_ID_BYTES)}"


def read_input(value: object, find: FindItem) -> list[Item]:
    """Check and normalize `input`.

    Args:
        value: A string or a list of items.
        find: Looks up what an `item_reference` refers to.

    Raises:
        ApiError: 400 whose `param` is the path of what is wrong, such as ``input[2].content[0].text``.
    """
    if isinstance(value, str):
        return [_message_item({}, "user", [_input_text(value)], "input")]
    if not isinstance(value, list):
        raise invalid_type("input", "a string or an array of items", value)
    if not value:
        raise invalid_value("input", "at least one item is required", code="empty_array")
    items = check_array(value, "input", items_max=MESSAGES_MAX)
    return [_read_item(item, f"input[{index}]", find) for index, item in enumerate(items)]


def _read_item(value: object, path: str, find: FindItem) -> Item:
    item = check_object(value, path)
    kind = item.get("type")
    if kind is None and "role" not in item:
        raise missing(f"{path}.type")
    kind = "message" if kind is None else kind
    if kind == "item_reference":
        return _find(item, path, find)
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        known = ", ".join((*_READERS, "item_reference"))
        raise invalid_value(f"{path}.type", f"{quoted(kind)} items are not supported by this server, only {known}")
    return read(item, path)


def _find(item: Item, path: str, find: FindItem) -> Item:
    item_id = check_string(required(item, "id", f"{path}.id"), f"{path}.id", chars_max=ID_CHARS_MAX)
    found = find(item_id)
    if found is None:
        message = (
            f"Item {quoted(item_id)} is not stored. Items are kept with their responses, in memory and within bounds; "
            "send the item itself instead."
        )
        raise ApiError(400, message, param=f"{path}.id", code="item_not_found")
    return found


def _read_message(item: Item, path: str) -> Item:
    role = check_choice(required(item, "role", f"{path}.role"), f"{path}.role", ROLES)
    content = required(item, "content", f"{path}.content")
    make = _output_text if role == "assistant" else _input_text
    if isinstance(content, str):
        return _message_item(item, role, [make(content)], path)
    if not isinstance(content, list):
        raise invalid_type(f"{path}.content", "a string or an array of parts", content)
    parts = check_array(content, f"{path}.content", items_max=PARTS_MAX)
    texts = [read_text_part(part, f"{path}.content[{index}]") for index, part in enumerate(parts)]
    return _message_item(item, role, [make(text) for text in texts], path)


def _message_item(item: Item, role: str, content: list[Item], path: str) -> Item:
    return {"type": "message", **_identity(item, "msg", path), "role": role, "content": content}


def _identity(item: Item, prefix: str, path: str) -> Item:
    item_id = read_string(item, "id", path=f"{path}.id", chars_max=ID_CHARS_MAX)
    status = item.get("status")
    status = "completed" if status is None else check_choice(status, f"{path}.status", STATUSES)
    return {"id": item_id or mint_item_id(prefix), "status": status}


def _input_text(text: str) -> Item:
    return {"type": "input_text", "text": text}


def _output_text(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def read_text_part(value: object, path: str) -> str:
    """The text of a part of a message.

    Raises:
        ApiError: 400, also for parts that hold no text.
    """
    part = check_object(value, path)
    kind = required(part, "type", f"{path}.type")
    if kind not in ("input_text", "output_text", "text", "refusal"):
        raise invalid_value(f"{path}.type", f"{quoted(kind)} parts are not supported: this model takes text only")
    name = "refusal" if kind == "refusal" else "text"
    return check_string(required(part, name, f"{path}.{name}"), f"{path}.{name}")


def _read_call(item: Item, path: str) -> Item:
    arguments = check_string(item.get("arguments", ""), f"{path}.arguments")
    identity = _identity(item, "fc", path)
    if identity["status"] != "incomplete":
        decode_arguments(arguments, f"{path}.arguments")
    return {
        "type": "function_call",
        **identity,
        "call_id": _read_call_id(item, path),
        "name": check_function_name(item.get("name"), f"{path}.name"),
        "arguments": arguments,
    }


def _read_call_id(item: Item, path: str) -> str:
    call_id = required(item, "call_id", f"{path}.call_id")
    return check_string(call_id, f"{path}.call_id", chars_max=ID_CHARS_MAX, chars_min=1)


def _read_output(item: Item, path: str) -> Item:
    output = required(item, "output", f"{path}.output")
    if isinstance(output, list):
        parts = check_array(output, f"{path}.output", items_max=PARTS_MAX)
        texts = [read_text_part(part, f"{path}.output[{index}]") for index, part in enumerate(parts)]
        output = [_input_text(text) for text in texts]
    elif not isinstance(output, str):
        raise invalid_type(f"{path}.output", "a string or an array of parts", output)
    call_id = _read_call_id(item, path)
    return {"type": "function_call_output", **_identity(item, "fco", path), "call_id": call_id, "output": output}


def _read_reasoning(item: Item, path: str) -> Item:
    summary = _read_texts(item, "summary", "summary_text", path)
    content = _read_texts(item, "content", "reasoning_text", path)
    if item.get("encrypted_content") is not None and not summary and not content:
        raise unsupported(f"{path}.encrypted_content", "only the server that encrypted it can read it")
    return {"type": "reasoning", **_identity(item, "rs", path), "summary": summary, "content": content}


def _read_texts(item: Item, name: str, kind: str, path: str) -> list[Item]:
    value = item.get(name)
    parts = [] if value is None else check_array(value, f"{path}.{name}", items_max=PARTS_MAX)
    texts = []
    for index, value in enumerate(parts):
        here = f"{path}.{name}[{index}]"
        part = check_object(value, here)
        texts.append({"type": kind, "text": check_string(required(part, "text", f"{here}.text"), f"{here}.text")})
    return texts


_READERS: dict[str, Callable[[Item, str], Item]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "reasoning": _read_reasoning,
}
