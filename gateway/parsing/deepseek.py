"""The calls of DeepSeek V3, R1 and V3.1: sections of control tokens around JSON."""

from __future__ import annotations

import re

from gateway.parsing.grammar import Grammar
from gateway.parsing.json_calls import NAME_CHARS_MAX
from gateway.parsing.json_text import json_value
from gateway.parsing.source import Malformed, Markers, Parse

BAR = "\N{FULLWIDTH VERTICAL LINE}"
SECTION, SECTION_END = f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁calls▁end{BAR}>"
CALL, SEPARATOR, CALL_END = f"<{BAR}tool▁call▁begin{BAR}>", f"<{BAR}tool▁sep{BAR}>", f"<{BAR}tool▁call▁end{BAR}>"
FENCE, FENCE_END = "```json", "```"

_NAME = re.compile(r"[\w.:/-]+")


class DeepseekCalls(Grammar):
    """A section of calls.

    V3.1 writes a name, the separator and the object; V3 and R1 write `function`, the separator, the name, and
    the object in a code fence.
    """

    special_tokens = frozenset({SECTION, SECTION_END, CALL, SEPARATOR, CALL_END})

    def run(self) -> Parse[None]:
        """Read the whole text."""
        openers, ends = Markers(SECTION, trim=True), Markers(SECTION_END)
        while (yield from self.source.until(openers, self.output.content)):
            yield from self.attempt(self._section(), SECTION, ends)

    def _section(self) -> Parse[None]:
        yield from self.source.skip_space()
        while (yield from self.source.expect(CALL, SECTION_END)) == CALL:
            yield from self._call()
            yield from self.source.skip_space()

    def _call(self) -> Parse[None]:
        name, _ = yield from self.source.head(Markers(SEPARATOR), NAME_CHARS_MAX)
        yield from self.source.skip_space()
        is_fenced = (yield from self.source.next_char()) != "{"
        if is_fenced:
            name, _ = yield from self.source.head(Markers(FENCE), NAME_CHARS_MAX)
            yield from self.source.skip_space()
        if not _NAME.fullmatch(name.strip()) or (yield from self.source.next_char()) != "{":
            raise Malformed
        self.output.begin(name.strip())
        yield from json_value(self.source, self.output.arguments)
        yield from self.source.skip_space()
        if is_fenced:
            yield from self.source.expect(FENCE_END)
            yield from self.source.skip_space()
        yield from self.source.expect(CALL_END)
        self.output.end()
