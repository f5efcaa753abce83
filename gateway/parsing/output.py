"""What a grammar found, gathered into events."""

from __future__ import annotations

from gateway.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from gateway.parsing.source import SPACE_CHARS_MAX, Source


class Output:
    """Gathers text and calls until the parser hands them on, text of one kind as one event.

    A call is `begin`, any number of `arguments`, and then `end`, or `abandon` where it turns out to be none.

    Args:
        source: The grammar's source. What it recorded is dropped as soon as it cannot be given back.
        whole_calls: Give a call only once it has ended, so that none is ever given in part.
    """

    def __init__(self, source: Source, *, whole_calls: bool = False) -> None:
        self._source = source
        self._whole_calls = whole_calls
        self._given: list[Event] = []
        self._kept: list[Event] = []  # of the open call, while it must be whole
        self.calls = 0
        """How many calls were given."""
        self._is_open = False
        self._last = ""  # the last character of the open call's arguments
        self._space = ""  # white space after a call, which is content only if content follows
        self._after_call = False

    def content(self, text: str) -> None:
        """Give text of the answer."""
        if self._after_call and text:
            text, self._space = self._space + text, ""
            if text.isspace() and len(text) <= SPACE_CHARS_MAX:
                self._space = text
                return
            self._after_call = False
        if text:
            self._given.append(Content(text))

    def reasoning(self, text: str) -> None:
        """Give text of the reasoning."""
        if text:
            self._given.append(Reasoning(text))

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Open a call."""
        self._is_open, self._last = True, ""
        self._keep(ToolCallBegin(self.calls, name, call_id or None))
        if not self._whole_calls:
            self._source.forget()

    def arguments(self, text: str) -> None:
        """Append to the open call's arguments, whose last character is given by `end`."""
        if text:
            text, self._last = self._last + text[:-1], text[-1]
            self._keep_arguments(text)

    def end(self) -> None:
        """Close the open call: it is complete. What was read of it is not kept any more."""
        self._keep_arguments(self._last)
        self._given += self._kept
        self._kept = []
        self.calls += 1
        self._is_open, self._after_call, self._space = False, True, ""
        self._source.record()

    def abandon(self) -> bool:
        """Leave the open call, if any, as it is; return whether none of it was given, so its text still can be."""
        was_given = self._is_open and not self._whole_calls
        self.calls += was_given
        self._kept = []
        self._is_open = False
        return not was_given

    def take(self) -> list[Event]:
        """Return what was gathered since the last time, neighbours of one kind joined."""
        given, self._given = self._given, []
        return merged(given)

    def _keep(self, event: Event) -> None:
        (self._kept if self._whole_calls else self._given).append(event)

    def _keep_arguments(self, text: str) -> None:
        if text:
            self._keep(ToolCallArguments(self.calls, text))


def merged(events: list[Event]) -> list[Event]:
    """Join the texts of neighbours that say the same of more text; the joined events of an answer are the same."""
    result: list[Event] = []
    texts: list[str] = []
    for event in events:
        if isinstance(event, ToolCallBegin) or not (result and _continues(result[-1], event)):
            _close(result, texts)
            result.append(event)
        if not isinstance(event, ToolCallBegin):
            texts.append(event.text)
    _close(result, texts)
    return result


def _continues(last: Event, event: Event) -> bool:
    if isinstance(last, ToolCallArguments) and isinstance(event, ToolCallArguments):
        return last.index == event.index
    return type(last) is type(event)


def _close(result: list[Event], texts: list[str]) -> None:
    if result and texts:
        last = result[-1]
        joined = "".join(texts)
        if isinstance(last, ToolCallArguments):
            result[-1] = ToolCallArguments(last.index, joined)
        elif isinstance(last, Content | Reasoning):
            result[-1] = type(last)(joined)
    texts.clear()
