"""What a parser says about the text it was given, in the order the model wrote it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text the model wrote before, or between, parts of its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A tool call starts; its arguments follow as `ToolCallArguments` of the same index.

    Attributes:
        index: Which call of the answer, counted from 0.
        name: The tool's name as the model wrote it; it need not be one that was offered.
        call_id: The id the model gave, where its format has one and it came before the arguments.
    """

    index: int
    name: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments.

    The texts of one index, joined, are a JSON object exactly when the model finished the call: the
    last brace is given only then.
    """

    index: int
    text: str


Event = Content | Reasoning | ToolCallBegin | ToolCallArguments
