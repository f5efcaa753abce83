"""Items as the messages that chat templates read.

Reasoning, words and calls that follow each other are one assistant message, as they were when the model wrote
them; each result of a call is a `tool` message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.openai_errors import ApiError, invalid_value, quoted
from gateway.openai_messages import ChatMessage, decode_arguments
from gateway.responses.items import Item


def to_messages(items: Iterable[Item], instructions: str | None) -> list[ChatMessage]:
    """Messages in order, instructions first.

    A call whose arguments were cut off is left out: no template could show it.

    Raises:
        ApiError: 400 for a result of a call that is not there, or where nothing is left to show.
    """
    conversation = _Conversation()
    for item in items:
        conversation.add(item)
    if not conversation.messages:
        raise invalid_value("input", "it holds nothing but calls that were cut off")
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    return [*system, *conversation.messages]


class _Conversation:
    """Messages so far.

    `_turn` is the assistant message that what comes next may still belong to.
    """

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._turn: ChatMessage | None = None
        self._names: dict[str, str] = {}

    def add(self, item: Item) -> None:
        match item["type"]:
            case "reasoning":
                self._add_reasoning(item)
            case "function_call":
                self._add_call(item)
            case "function_call_output":
                self._add_result(item)
            case _ if item["role"] == "assistant":
                self._open_turn(without=("content", "tool_calls"))["content"] = _text(item["content"])
            case _:
                self._close({"role": item["role"], "content": _text(item["content"])})

    def _add_reasoning(self, item: Item) -> None:
        turn = self._open_turn(without=("content", "tool_calls"))
        before = turn.get("reasoning_content")
        turn["reasoning_content"] = f"{before}\n{_reasoning(item)}" if before else _reasoning(item)

    def _open_turn(self, *, without: tuple[str, ...] = ()) -> ChatMessage:
        """The assistant message to add to: the last one, unless it holds one of these already."""
        if self._turn is None or any(self._turn.get(name) for name in without):
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn

    def _close(self, message: ChatMessage) -> None:
        self._turn = None
        self.messages.append(message)

    def _add_call(self, item: Item) -> None:
        try:
            arguments: dict[str, Any] = decode_arguments(item["arguments"], "arguments")
        except ApiError:
            return
        self._names[item["call_id"]] = item["name"]
        call = {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": arguments},
        }
        self._open_turn().setdefault("tool_calls", []).append(call)

    def _add_result(self, item: Item) -> None:
        name = self._names.get(item["call_id"])
        if name is None:
            raise invalid_value("input", f"there is no function call {quoted(item['call_id'])} before its output")
        output = item["output"]
        content = output if isinstance(output, str) else _text(output)
        self._close({"role": "tool", "tool_call_id": item["call_id"], "name": name, "content": content})


def _text(parts: Iterable[Item]) -> str:
    return "\n".join(part["text"] for part in parts)


def _reasoning(item: Item) -> str:
    return _text(item.get("content") or item["summary"])
