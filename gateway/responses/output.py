"""The output items of a response while they are being written: what an answer shows goes in, events come out.

A message, a piece of reasoning and a function call are items, opened when the first of their kind shows and closed
when something else does. Events are dicts without their `sequence_number`, which whoever sends them counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gateway.answer import Piece
from gateway.json_fault import is_json_object
from gateway.logprobs import LogprobEntry, Spelled
from gateway.parsing.events import Content, Reasoning, ToolCallArguments, ToolCallBegin
from gateway.responses.items import Item

ResponseEvent = dict[str, Any]
MintId = Callable[[str], str]


class Output:
    """All items of one response.

    Args:
        mint_id: Makes ids of items from their prefix.
        has_logprobs: Whether texts come with the log-probabilities of their tokens.
    """

    def __init__(self, mint_id: MintId, *, has_logprobs: bool) -> None:
        self._mint_id = mint_id
        self._has_logprobs = has_logprobs
        self._unsent: list[LogprobEntry] = []
        self._closed: list[Item] = []
        self._open: MessageItem | ReasoningItem | CallItem | None = None

    def push(self, piece: Piece) -> list[ResponseEvent]:
        """What a token adds."""
        if piece.logprobs is not None and self._has_logprobs:
            self._unsent.append(piece.logprobs)
        events: list[ResponseEvent] = []
        for event in piece.events:
            match event:
                case Content():
                    message, opening = self._message()
                    events += [*opening, message.add(event.text, self._take_logprobs())]
                case Reasoning():
                    reasoning, opening = self._reasoning()
                    events += [*opening, reasoning.add(event.text)]
                    self._unsent.clear()
                case ToolCallBegin():
                    call_id = event.call_id or self._mint_id("call")
                    call = CallItem(self._next_index, self._mint_id("fc"), call_id, event.name)
                    events += self._switch(call)
                    self._unsent.clear()
                case ToolCallArguments():
                    events += self._arguments(event.text)
                    self._unsent.clear()
        return events

    def finish(self, *, is_cut: bool) -> list[ResponseEvent]:
        """Close the last item; where nothing was shown there is an empty message.

        Args:
            is_cut: The answer was longer than allowed.
        """
        opening = self._message()[1] if self._open is None else []
        return [*opening, *self._close("incomplete" if is_cut else "completed")]

    def items(self, status: str) -> list[Item]:
        """All items so far, an open one with this status."""
        return [*self._closed, *([self._open.shown(status)] if self._open else [])]

    @property
    def _next_index(self) -> int:
        return len(self._closed) + (self._open is not None)

    def _message(self) -> tuple[MessageItem, list[ResponseEvent]]:
        if isinstance(self._open, MessageItem):
            return self._open, []
        item = MessageItem(self._next_index, self._mint_id("msg"))
        return item, self._switch(item)

    def _reasoning(self) -> tuple[ReasoningItem, list[ResponseEvent]]:
        if isinstance(self._open, ReasoningItem):
            return self._open, []
        item = ReasoningItem(self._next_index, self._mint_id("rs"))
        return item, self._switch(item)

    def _arguments(self, text: str) -> list[ResponseEvent]:
        if not isinstance(self._open, CallItem):
            raise ValueError("arguments without a call")
        return [self._open.add(text)]

    def _switch(self, item: MessageItem | ReasoningItem | CallItem) -> list[ResponseEvent]:
        closing = self._close("completed")
        self._open = item
        return [*closing, *item.begin()]

    def _close(self, status: str) -> list[ResponseEvent]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        if isinstance(item, CallItem):
            status = "completed" if item.is_complete else "incomplete"
        events = item.end(status)
        self._closed.append(item.shown(status))
        return events

    def _take_logprobs(self) -> list[Item]:
        entries, self._unsent = self._unsent, []
        return logprobs_json(entries)


class MessageItem:
    """Text that the model says to its user.

    Args:
        index: Among the items.
        item_id: Its own.
    """

    def __init__(self, index: int, item_id: str) -> None:
        self._id = item_id
        self._index = index
        self._place = {"item_id": item_id, "output_index": index, "content_index": 0}
        self._texts: list[str] = []
        self._logprobs: list[Item] = []

    def begin(self) -> list[ResponseEvent]:
        """The item, and its one part."""
        item = {**self.shown("in_progress"), "content": []}
        return [
            _added(self._index, item),
            {"type": "response.content_part.added", **self._place, "part": self._part()},
        ]

    def add(self, text: str, logprobs: list[Item]) -> ResponseEvent:
        """More text."""
        self._texts.append(text)
        self._logprobs += logprobs
        return {"type": "response.output_text.delta", **self._place, "delta": text, "logprobs": logprobs}

    def end(self, status: str) -> list[ResponseEvent]:
        """The whole text, part and item."""
        part = self._part()
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            {"type": "response.output_text.done", **self._place, **text},
            {"type": "response.content_part.done", **self._place, "part": part},
            _done(self._index, self.shown(status)),
        ]

    def shown(self, status: str) -> Item:
        """The item."""
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": [self._part()]}

    def _part(self) -> Item:
        return {
            "type": "output_text",
            "text": "".join(self._texts),
            "annotations": [],
            "logprobs": list(self._logprobs),
        }


class ReasoningItem:
    """Text that the model says to itself.

    Args:
        index: Among the items.
        item_id: Its own.
    """

    def __init__(self, index: int, item_id: str) -> None:
        self._id = item_id
        self._index = index
        self._place = {"item_id": item_id, "output_index": index, "content_index": 0}
        self._texts: list[str] = []

    def begin(self) -> list[ResponseEvent]:
        """The item, and its one part."""
        item = {**self.shown("in_progress"), "content": []}
        return [
            _added(self._index, item),
            {"type": "response.content_part.added", **self._place, "part": self._part()},
        ]

    def add(self, text: str) -> ResponseEvent:
        """More text."""
        self._texts.append(text)
        return {"type": "response.reasoning_text.delta", **self._place, "delta": text}

    def end(self, status: str) -> list[ResponseEvent]:
        """The whole text, part and item."""
        part = self._part()
        return [
            {"type": "response.reasoning_text.done", **self._place, "text": part["text"]},
            {"type": "response.content_part.done", **self._place, "part": part},
            _done(self._index, self.shown(status)),
        ]

    def shown(self, status: str) -> Item:
        """The item."""
        return {"id": self._id, "type": "reasoning", "status": status, "summary": [], "content": [self._part()]}

    def _part(self) -> Item:
        return {"type": "reasoning_text", "text": "".join(self._texts)}


class CallItem:
    """A call of a function.

    Args:
        index: Among the items.
        item_id: Its own.
        call_id: What its result refers to.
        name: The function's.
    """

    def __init__(self, index: int, item_id: str, call_id: str, name: str) -> None:
        self._id = item_id
        self._index = index
        self._place = {"item_id": item_id, "output_index": index}
        self._call_id = call_id
        self._name = name
        self._texts: list[str] = []

    def begin(self) -> list[ResponseEvent]:
        """The item, without arguments."""
        return [_added(self._index, self.shown("in_progress"))]

    def add(self, text: str) -> ResponseEvent:
        """More of the arguments."""
        self._texts.append(text)
        return {"type": "response.function_call_arguments.delta", **self._place, "delta": text}

    def end(self, status: str) -> list[ResponseEvent]:
        """All arguments, and the item."""
        done = {"name": self._name, "arguments": "".join(self._texts)}
        return [
            {"type": "response.function_call_arguments.done", **self._place, **done},
            _done(self._index, self.shown(status)),
        ]

    @property
    def is_complete(self) -> bool:
        """Whether the arguments are a JSON object: a parser gives the last brace only to a call that was finished."""
        return is_json_object("".join(self._texts))

    def shown(self, status: str) -> Item:
        """The item."""
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._texts),
        }


def _added(index: int, item: Item) -> ResponseEvent:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def _done(index: int, item: Item) -> ResponseEvent:
    return {"type": "response.output_item.done", "output_index": index, "item": item}


def logprobs_json(entries: Sequence[LogprobEntry]) -> list[Item]:
    """As responses write them."""
    return [{**_spelled(entry.token), "top_logprobs": [_spelled(top) for top in entry.top]} for entry in entries]


def _spelled(token: Spelled) -> Item:
    return {"token": token.text, "bytes": list(token.data), "logprob": token.logprob}
