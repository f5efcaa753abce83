"""Families that write their reasoning between two markers."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.parsing.grammar import Grammar
from gateway.parsing.source import Markers, Parse


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Where reasoning stands in a family's text.

    Attributes:
        opener: What comes before it.
        closer: What comes after it.
        trim: Whether white space beside a marker belongs to it.
        special_tokens: Those of the markers that are special tokens of the family's tokenizers.
    """

    opener: str
    closer: str
    trim: bool = True
    special_tokens: frozenset[str] = frozenset()


class ReasoningParser(Grammar):
    """Reasoning at the beginning of the text, then content; a closer alone, later, is content.

    Reasoning that is not closed goes on to the end of the text.

    Args:
        form: The markers.
        is_open: Whether the prompt has opened the reasoning already.
        ended_by: Markers of the family's calls that end the reasoning as well; they are then content.
    """

    def __init__(self, form: ReasoningFormat, *, is_open: bool, ended_by: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.special_tokens = form.special_tokens
        self._form = form
        self._is_open = is_open
        self._ends = Markers(form.closer, *ended_by, trim=form.trim)

    def run(self) -> Parse[None]:
        """Read the whole text."""
        source, form = self.source, self._form
        if form.trim and (yield from source.follows(form.opener)):
            yield from source.skip_space()
        if (yield from source.accept(form.opener)):
            self._is_open = True
        if self._is_open:
            yield from self._reasoning()
        while (yield from source.peek()):
            self.output.content(source.rest())

    def _reasoning(self) -> Parse[None]:
        if self._form.trim:
            yield from self.source.skip_space()
        end = yield from self.source.until(self._ends, self.output.reasoning)
        if end == self._form.closer and self._form.trim:
            yield from self.source.skip_space()
        elif end != self._form.closer:
            self.output.content(end)
