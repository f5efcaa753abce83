"""Gemma 4's calls: an object without quotes around keys, and with a token of their own around strings."""

from __future__ import annotations

import json

from gateway.parsing.grammar import Grammar
from gateway.parsing.json_calls import NAME_CHARS_MAX
from gateway.parsing.json_text import escaped
from gateway.parsing.source import Malformed, Markers, Parse
from gateway.parsing.tool_schemas import ANY, TEXT, Types, argument_json

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
NESTING_MAX = 64
SCALAR_CHARS_MAX = 4096  # an unquoted value; strings have quotes


class GemmaCalls(Grammar):
    """`<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`, given as JSON while it arrives."""

    special_tokens = frozenset({OPEN, CLOSE, QUOTE})

    def run(self) -> Parse[None]:
        """Read the whole text."""
        openers, ends = Markers(OPEN), Markers(CLOSE)
        while (yield from self.source.until(openers, self.output.content)):
            yield from self.attempt(self._call(), OPEN, ends)

    def _call(self) -> Parse[None]:
        yield from self.source.skip_space()
        yield from self.source.expect("call:")
        name, after = yield from self.source.head(Markers("{", CLOSE), NAME_CHARS_MAX)
        name = name.strip()
        if after == CLOSE or not name:
            raise Malformed
        self.output.begin(name)
        yield from self._object(NESTING_MAX, name)
        yield from self.source.skip_space()
        yield from self.source.expect(CLOSE)
        self.output.end()

    def _object(self, depth: int, tool: str = "") -> Parse[None]:
        """Read an object behind its brace; `tool` is the tool whose arguments it is."""
        give = self.output.arguments
        give("{")
        separator = ""
        while (yield from self._has_more("}")):
            key = yield from self._key()
            give(separator + json.dumps(key, ensure_ascii=False) + ": ")
            yield from self._value(depth, self.tools.types(tool, key) if tool in self.tools else ANY)
            separator = ", "
            if not (yield from self._goes_on("}")):
                break
        give("}")

    def _list(self, depth: int) -> Parse[None]:
        give = self.output.arguments
        give("[")
        separator = ""
        while (yield from self._has_more("]")):
            give(separator)
            yield from self._value(depth, ANY)
            separator = ", "
            if not (yield from self._goes_on("]")):
                break
        give("]")

    def _has_more(self, closer: str) -> Parse[bool]:
        yield from self.source.skip_space()
        return not (yield from self.source.accept(closer))

    def _goes_on(self, closer: str) -> Parse[bool]:
        yield from self.source.skip_space()
        return (yield from self.source.expect(",", closer)) == ","

    def _key(self) -> Parse[str]:
        quote = yield from self.source.accept(QUOTE)
        key, _ = yield from self.source.head(Markers(quote or ":"), NAME_CHARS_MAX)
        if quote:
            yield from self.source.skip_space()
            yield from self.source.expect(":")
        return key if quote else key.strip()

    def _value(self, depth: int, types: Types) -> Parse[None]:
        if depth == 0:
            raise Malformed
        yield from self.source.skip_space()
        opener = yield from self.source.accept("{", "[", QUOTE)
        if opener == "{":
            yield from self._object(depth - 1)
        elif opener == "[":
            yield from self._list(depth - 1)
        elif opener:
            yield from self._string()
        else:
            yield from self._scalar(types)

    def _string(self) -> Parse[None]:
        self.output.arguments('"')
        yield from self.source.up_to(Markers(QUOTE), lambda text: self.output.arguments(escaped(text)))
        self.output.arguments('"')

    def _scalar(self, types: Types) -> Parse[None]:
        text = ""
        while (yield from self.source.next_char()) not in ",}]":
            text += self.source.take(1)
            if len(text) > SCALAR_CHARS_MAX or text.endswith(CLOSE):
                raise Malformed
        self.output.arguments(argument_json(text.strip(), TEXT if types == TEXT else ANY))
