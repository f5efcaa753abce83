"""Kimi K2's calls: a section of control tokens; a call's id holds its name."""

from __future__ import annotations

import re

from gateway.parsing.grammar import Grammar
from gateway.parsing.json_calls import NAME_CHARS_MAX
from gateway.parsing.json_text import json_value
from gateway.parsing.source import CutOff, Malformed, Markers, Parse, discard

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_ID = re.compile(r"(?:functions\.)?(?P<name>[\w./-]+?)(?::\d+)?")


class KimiCalls(Grammar):
    """`functions.name:0`, then a JSON object, between control tokens. Other text within the section is left out."""

    special_tokens = frozenset({SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END})

    def run(self) -> Parse[None]:
        """Read the whole text."""
        openers, ends = Markers(SECTION), Markers(SECTION_END)
        while (yield from self.source.until(openers, self.output.content)):
            yield from self.attempt(self._section(), SECTION, ends)

    def _section(self) -> Parse[None]:
        marks = Markers(CALL, SECTION_END)
        while mark := (yield from self.source.until(marks, discard)):
            if mark == SECTION_END:
                return
            yield from self._call()
        raise CutOff

    def _call(self) -> Parse[None]:
        call_id, _ = yield from self.source.head(Markers(ARGUMENTS), NAME_CHARS_MAX)
        match = _ID.fullmatch(call_id.strip())
        yield from self.source.skip_space()
        if not match or (yield from self.source.next_char()) != "{":
            raise Malformed
        self.output.begin(match["name"], call_id.strip())
        yield from json_value(self.source, self.output.arguments)
        yield from self.source.skip_space()
        yield from self.source.expect(CALL_END)
        self.output.end()
