"""Mistral's calls: a list of JSON objects, or name and arguments between control tokens."""

from __future__ import annotations

import re

from gateway.parsing.grammar import Grammar
from gateway.parsing.json_calls import NAME_CHARS_MAX, call_or_list
from gateway.parsing.json_text import json_value
from gateway.parsing.source import Malformed, Markers, Parse

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_NAME_CHAR = re.compile(r"[\w.:/-]")


class MistralCalls(Grammar):
    """`[TOOL_CALLS] [{…}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` any number of times, with `[CALL_ID]id` before `[ARGS]`.

    Without `[ARGS]` the arguments follow the name directly, as some tokenizers of the family have it.
    """

    special_tokens = frozenset({CALLS, ARGS, CALL_ID})

    def run(self) -> Parse[None]:
        """Read the whole text."""
        openers = Markers(CALLS)
        while (yield from self.source.until(openers, self.output.content)):
            yield from self.attempt(self._call(), CALLS, openers)

    def _call(self) -> Parse[None]:
        yield from self.source.skip_space()
        if (yield from self.source.is_next("[", "{")):
            yield from call_or_list(self.source, self.output)
            return
        name = yield from self.source.word(_NAME_CHAR, NAME_CHARS_MAX)
        call_id = ""
        if (yield from self.source.accept(CALL_ID)):
            call_id = yield from self.source.word(_NAME_CHAR, NAME_CHARS_MAX)
        yield from self.source.accept(ARGS)
        yield from self.source.skip_space()
        if (yield from self.source.next_char()) != "{" or not name:
            raise Malformed
        self.output.begin(name, call_id)
        yield from json_value(self.source, self.output.arguments)
        self.output.end()
