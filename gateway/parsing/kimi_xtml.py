"""Kimi K3's format, XTML: elements of control tokens for reasoning, answer and calls."""

from __future__ import annotations

import html
import re

from gateway.parsing.arguments import ArgumentsWriter
from gateway.parsing.grammar import Grammar, Tools
from gateway.parsing.json_calls import NAME_CHARS_MAX
from gateway.parsing.json_text import json_value
from gateway.parsing.source import Malformed, Markers, Parse
from gateway.parsing.tool_schemas import ANY

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"

_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def opening(element: str) -> str:
    """Return an element's opening."""
    return f"{OPEN}{element}{SEPARATOR}"


def closing(element: str) -> str:
    """Return an element's end."""
    return f"{CLOSE}{element}{SEPARATOR}"


class KimiXtmlParser(Grammar):
    """Reads the elements `think`, `response` and `tools`; what is in none of them is content.

    A value is given as the type that its element names. As a value may mention the tokens, it ends only
    where another element begins or ends.

    Args:
        tools: The tools offered.
        is_reasoning: Whether the prompt has opened `think`; if not, it has opened `response`.
        whole_calls: See `Grammar`.
    """

    special_tokens = frozenset({OPEN, CLOSE, SEPARATOR})

    def __init__(self, tools: Tools = (), *, is_reasoning: bool = False, whole_calls: bool = False) -> None:
        super().__init__(tools, whole_calls=whole_calls)
        self._is_reasoning = is_reasoning

    def run(self) -> Parse[None]:
        """Read the whole text."""
        inside = Markers(closing("think"), opening("response"), opening("tools"))
        outside = Markers(
            *map(opening, ("think", "response", "tools")), *map(closing, ("think", "response", "tools", "message"))
        )
        while True:
            marks, give = (inside, self.output.reasoning) if self._is_reasoning else (outside, self.output.content)
            mark = yield from self.source.until(marks, give)
            if not mark:
                return
            self._is_reasoning = mark == opening("think")
            if mark == opening("tools"):
                yield from self.attempt(self._tools(), mark, Markers(closing("tools")))

    def _tools(self) -> Parse[None]:
        while (yield from self.source.expect(OPEN + "call", closing("tools"))) != closing("tools"):
            yield from self._call()

    def _call(self) -> Parse[None]:
        name = (yield from self._attributes()).get("tool", "")
        if not name:
            raise Malformed
        self.output.begin(name)
        if (yield from self.source.accept(OPEN + "json")):
            yield from self._json()
        else:
            yield from self._arguments()
        self.output.end()

    def _json(self) -> Parse[None]:
        """Read arguments that came as one JSON object."""
        yield from self._attributes()
        yield from self.source.skip_space()
        if (yield from self.source.next_char()) != "{":
            raise Malformed
        yield from json_value(self.source, self.output.arguments)
        yield from self.source.skip_space()
        yield from self.source.expect(closing("json") + closing("call"))

    def _arguments(self) -> Parse[None]:
        arguments = ArgumentsWriter(self.output.arguments)
        while (yield from self.source.expect(OPEN + "argument", closing("call"))) != closing("call"):
            attributes = yield from self._attributes()
            kind = attributes.get("type", "")
            arguments.open(attributes.get("key", ""), frozenset({kind}) if kind else ANY)
            yield from self._value(arguments)
            arguments.close()
        arguments.end()

    def _attributes(self) -> Parse[dict[str, str]]:
        text, _ = yield from self.source.head(Markers(SEPARATOR), NAME_CHARS_MAX)
        return {key: html.unescape(value) for key, value in _ATTRIBUTE.findall(text)}

    def _value(self, arguments: ArgumentsWriter) -> Parse[None]:
        ends = Markers(closing("argument"))
        while True:
            end = yield from self.source.up_to(ends, arguments.text)
            if (yield from self.source.follows(OPEN, CLOSE, end=True)):
                return
            arguments.text(end)
