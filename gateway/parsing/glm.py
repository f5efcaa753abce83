"""GLM's calls: a name, then pairs of tags around keys and values, in two layouts that differ in newlines."""

from __future__ import annotations

from gateway.parsing.arguments import ArgumentsWriter
from gateway.parsing.grammar import Grammar
from gateway.parsing.json_calls import NAME_CHARS_MAX
from gateway.parsing.source import Malformed, Markers, Parse

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class GlmCalls(Grammar):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`.

    Values are raw text, typed by the tool's schema. A value whose own end is missing ends with the call,
    if nothing but another call comes after that.
    """

    special_tokens = frozenset({OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END})

    def run(self) -> Parse[None]:
        """Read the whole text."""
        openers, ends = Markers(OPEN, trim=True), Markers(CLOSE)
        while (yield from self.source.until(openers, self.output.content)):
            yield from self.attempt(self._call(), OPEN, ends)

    def _call(self) -> Parse[None]:
        name, after = yield from self.source.head(Markers(KEY, CLOSE, "\n"), NAME_CHARS_MAX)
        name = name.strip()
        if not name or any(char.isspace() or char in "{<" for char in name):
            raise Malformed
        self.output.begin(name)
        arguments = ArgumentsWriter(self.output.arguments)
        if after == "\n":
            after = yield from self._next_tag()
        while after == KEY:
            key, _ = yield from self.source.head(Markers(KEY_END), NAME_CHARS_MAX)
            yield from self.source.skip_space()
            yield from self.source.expect(VALUE)
            arguments.open(key.strip(), self.tools.types(name, key.strip()))
            after = (yield from self._value(arguments)) or (yield from self._next_tag())
        arguments.end()
        self.output.end()

    def _next_tag(self) -> Parse[str]:
        yield from self.source.skip_space()
        return (yield from self.source.expect(KEY, CLOSE))

    def _value(self, arguments: ArgumentsWriter) -> Parse[str]:
        """Read a value and its end; return the call's end if that came instead."""
        ends = Markers(VALUE_END, CLOSE)
        while True:
            end = yield from self.source.up_to(ends, arguments.text)
            if end == VALUE_END:
                arguments.close()
                return ""
            if (yield from self.source.follows(OPEN, end=True)):
                arguments.close()
                return CLOSE
            arguments.text(end)
