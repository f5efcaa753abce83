"""What a parser makes of a model's text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text that the model says to its user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model says to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call begins.

    Args:
        index: Of the call within the answer, from 0.
        name: The function's.
        call_id: Where the model's own format gives one.
    """

    index: int
    name: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments; all of them joined are the text of a JSON object."""

    index: int
    text: str


Event = Content | Reasoning | ToolCallBegin | ToolCallArguments
