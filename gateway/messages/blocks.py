"""The content blocks of a message while they are being written: what an answer shows goes in, events come out.

Text, thinking and each use of a tool are blocks, opened when the first of their kind shows and closed when
something else does.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from gateway.answer import Piece, mint_call_id
from gateway.json_fault import is_json_object
from gateway.openai_errors import ApiError
from gateway.parsing.events import Content, Reasoning, ToolCallArguments, ToolCallBegin

SIGNATURE_BYTES = 32

DIRECT = {"type": "direct"}
"""Who calls a tool: the model itself, not code that it runs."""

Block = dict[str, Any]
MessageEvent = dict[str, Any]


class Blocks:
    """All blocks of one message.

    Args:
        shows_thinking: Whether thinking is among them.
    """

    def __init__(self, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._closed: list[OpenBlock] = []
        self._open: OpenBlock | None = None
        self._is_cut = False

    def push(self, piece: Piece) -> list[MessageEvent]:
        """What a token adds."""
        events: list[MessageEvent] = []
        for event in piece.events:
            match event:
                case Content():
                    events += self._add("text", event.text)
                case Reasoning() if self._shows_thinking:
                    events += self._add("thinking", event.text)
                case ToolCallBegin():
                    call = {"id": event.call_id or mint_call_id(), "name": event.name}
                    events += self._switch(OpenBlock("tool_use", self._next_index, call))
                case ToolCallArguments():
                    events += self._add("tool_use", event.text)
                case _:  # thinking that nobody asked for
                    pass
        return events

    def finish(self, *, is_cut: bool) -> list[MessageEvent]:
        """Close the last block; where nothing was shown there is an empty text.

        Args:
            is_cut: The answer was longer than allowed, so the input of a tool may be incomplete.
        """
        self._is_cut = is_cut
        opening = self._switch(OpenBlock("text", 0, {})) if self._open is None else []
        return [*opening, *self._close()]

    @property
    def has_tool_use(self) -> bool:
        """Whether a tool is to be called: one whose input was not finished must not be."""
        return any(block.kind == "tool_use" and block.is_complete for block in self._closed)

    def content(self) -> list[Block]:
        """All blocks once they are closed; without the use of a tool whose input was cut off, which is no JSON."""
        closed = self._closed
        if self._is_cut and not closed[-1].is_complete:
            closed = closed[:-1]
        return [block.shown() for block in closed]

    @property
    def _next_index(self) -> int:
        return len(self._closed) + (self._open is not None)

    def _add(self, kind: str, text: str) -> list[MessageEvent]:
        opening: list[MessageEvent] = []
        if self._open is None or self._open.kind != kind:
            if kind == "tool_use":
                raise ValueError("arguments without a call")
            opening = self._switch(OpenBlock(kind, self._next_index, {}))
        return [*opening, self._open.add(text)] if self._open else opening

    def _switch(self, block: OpenBlock) -> list[MessageEvent]:
        closing = self._close()
        self._open = block
        return [*closing, block.begin()]

    def _close(self) -> list[MessageEvent]:
        if self._open is None:
            return []
        block, self._open = self._open, None
        self._closed.append(block)
        return block.end()


class OpenBlock:
    """One block.

    Args:
        kind: `text`, `thinking` or `tool_use`.
        index: Among the blocks.
        call: `id` and `name` of the use of a tool.
    """

    def __init__(self, kind: str, index: int, call: dict[str, str]) -> None:
        self.kind = kind
        self._index = index
        self._call = call
        self._texts: list[str] = []

    def begin(self) -> MessageEvent:
        """The block, empty."""
        empty: Block
        match self.kind:
            case "text":
                empty = {"text": "", "citations": None}
            case "thinking":
                empty = {"thinking": "", "signature": ""}
            case _:
                empty = {**self._call, "input": {}, "caller": DIRECT}
        block = {"type": self.kind, **empty}
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def add(self, text: str) -> MessageEvent:
        """More of it."""
        self._texts.append(text)
        match self.kind:
            case "text":
                return self._delta("text_delta", "text", text)
            case "thinking":
                return self._delta("thinking_delta", "thinking", text)
            case _:
                return self._delta("input_json_delta", "partial_json", text)

    def end(self) -> list[MessageEvent]:
        """It closes: thinking with its signature."""
        stop: MessageEvent = {"type": "content_block_stop", "index": self._index}
        if self.kind == "thinking":
            return [self._delta("signature_delta", "signature", self._signature()), stop]
        return [stop]

    @property
    def is_complete(self) -> bool:
        """False only for the use of a tool whose input is no JSON object."""
        return self.kind != "tool_use" or is_json_object("".join(self._texts))

    def shown(self) -> Block:
        """The block.

        Raises:
            ApiError: 502 where the model has not written JSON: then there is no such block, and a second try may help.
        """
        text = "".join(self._texts)
        match self.kind:
            case "text":
                return {"type": "text", "text": text, "citations": None}
            case "thinking":
                return {"type": "thinking", "thinking": text, "signature": self._signature()}
            case _:
                return {"type": "tool_use", **self._call, "input": self._input(text), "caller": DIRECT}

    def _input(self, text: str) -> Block:
        if not self.is_complete:
            message = f"The model called {self._call['name']!r} with an input that is not a JSON object."
            raise ApiError(502, message, kind="server_error", code="invalid_tool_input")
        return msgspec.json.decode(text, type=Block)

    def _delta(self, kind: str, name: str, text: str) -> MessageEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, name: text}}

    def _signature(self) -> str:
        """A digest of the text, because clients want one; nothing is made of it when it comes back."""
        return hashlib.blake2b("".join(self._texts).encode(), digest_size=SIGNATURE_BYTES).hexdigest()
