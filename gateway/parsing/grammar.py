"""The parser that runs a grammar."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.parsing.events import Event
from gateway.parsing.output import Output
from gateway.parsing.source import CutOff, Malformed, Markers, Parse, Source, discard
from gateway.parsing.tool_schemas import ToolSchemas

Tools = Sequence[Mapping[str, Any]]


class Grammar(ABC):
    """An `OutputParser` whose grammar is the generator `run`.

    Args:
        tools: The tools offered, as OpenAI's API has them.
        whole_calls: Give a call only once it is complete; one that breaks off is then never given.
    """

    special_tokens: frozenset[str] = frozenset()

    def __init__(self, tools: Tools = (), *, whole_calls: bool = False) -> None:
        self.tools = ToolSchemas(tools)
        self.source = Source()
        self.output = Output(self.source, whole_calls=whole_calls)
        self._steps = self._run()

    @abstractmethod
    def run(self) -> Parse[None]:
        """Read the whole text. A `CutOff` may leave it: what was not given by then is left out."""

    def push(self, text: str) -> list[Event]:
        """Take more text; see `OutputParser`."""
        self.source.feed(text)
        next(self._steps, None)
        return self.output.take()

    def finish(self) -> list[Event]:
        """Return what was held back; see `OutputParser`."""
        self.source.end()
        next(self._steps, None)
        return self.output.take()

    def attempt(self, body: Parse[None], opening: str, closers: Markers) -> Parse[None]:
        """Read a call, or give its text as content if it is none: from `opening` on, the marker that was read last.

        Where part of it was given already, the text up to the next of `closers` is left out instead.
        """
        self.source.record(self.source.space_before + opening)
        try:
            yield from body
        except Malformed:
            text = self.source.recorded()
            if self.output.abandon():
                self.output.content(text)
            else:
                yield from self.source.until(closers, discard)
        self.source.forget()

    def attempt_bare(self, body: Parse[None], closers: Markers) -> Parse[None]:
        """Read calls that no marker announced; text that breaks off before the first call is given is content."""
        try:
            yield from self.attempt(body, "", closers)
        except CutOff:
            text = self.source.recorded()
            if self.output.abandon() and not self.output.calls:
                self.output.content(text)

    def _run(self) -> Parse[None]:
        try:
            yield from self.run()
        except CutOff:
            self.output.abandon()
