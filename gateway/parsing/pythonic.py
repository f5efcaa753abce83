"""Calls written as Python: Llama 4's, and those of other families."""

from __future__ import annotations

import re

from gateway.parsing.grammar import Grammar, Tools
from gateway.parsing.json_calls import NAME_CHARS_MAX
from gateway.parsing.llama_json import call_objects
from gateway.parsing.python_literal import python_value
from gateway.parsing.source import Malformed, Markers, Parse

START, END = "<|python_start|>", "<|python_end|>"

_NAME_CHAR = re.compile(r"[\w.-]")
_KEY_CHAR = re.compile(r"\w")


class PythonicCalls(Grammar):
    """`[f(a=1), g()]` at the beginning of the answer, or anywhere between the family's tokens.

    A list is calls only if it names tools that were offered, for a list may as well be the answer. Some of
    the models write JSON objects in the same places, as Llama 3 does.

    Args:
        tools: The tools offered.
        start: The token before calls.
        end: The token after them.
        whole_calls: See `Grammar`.
    """

    def __init__(self, tools: Tools = (), *, start: str = START, end: str = END, whole_calls: bool = False) -> None:
        super().__init__(tools, whole_calls=whole_calls)
        self.special_tokens = frozenset({start, end})
        self._start, self._end = start, end

    def run(self) -> Parse[None]:
        """Read the whole text."""
        starts, ends = Markers(self._start, trim=True), Markers(self._end, "\n")
        if (yield from self.source.follows("[", "{")):
            yield from self.attempt_bare(self._calls(), ends)
        while (yield from self.source.until(starts, self.output.content)):
            yield from self.attempt(self._calls(), "", ends)

    def _calls(self) -> Parse[None]:
        yield from self.source.skip_space()
        if (yield from self.source.is_next("{")):
            yield from call_objects(self.source, self.output, self.tools)
        else:
            yield from self._list()
        if (yield from self.source.follows(self._end)):
            yield from self.source.skip_space()
            yield from self.source.accept(self._end)

    def _list(self) -> Parse[None]:
        yield from self.source.expect("[")
        while True:
            yield from self.source.skip_space()
            yield from self._call()
            yield from self.source.skip_space()
            if (yield from self.source.expect(",", "]")) == "]":
                return

    def _call(self) -> Parse[None]:
        name = yield from self.source.word(_NAME_CHAR, NAME_CHARS_MAX)
        yield from self.source.expect("(")
        if name not in self.tools:
            raise Malformed
        self.output.begin(name)
        self.output.arguments("{")
        separator = ""
        yield from self.source.skip_space()
        while not (yield from self.source.accept(")")):
            key = yield from self.source.word(_KEY_CHAR, NAME_CHARS_MAX)
            yield from self.source.skip_space()
            yield from self.source.expect("=")
            self.output.arguments(f'{separator}"{key}": ')
            yield from python_value(self.source, self.output.arguments)
            separator = ", "
            yield from self._to_next_argument()
        self.output.arguments("}")
        self.output.end()

    def _to_next_argument(self) -> Parse[None]:
        yield from self.source.skip_space()
        if not (yield from self.source.accept(",")) and not (yield from self.source.is_next(")")):
            yield from self.source.expect(",", ")")
        yield from self.source.skip_space()
