"""Calls written as `invoke` and `parameter` elements: DeepSeek's DSML from V3.2 on, and MiniMax."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.parsing.arguments import ArgumentsWriter
from gateway.parsing.grammar import Grammar, Tools
from gateway.parsing.json_calls import NAME_CHARS_MAX
from gateway.parsing.source import Malformed, Markers, Parse
from gateway.parsing.tool_schemas import ANY, TEXT, Types

_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class InvokeFormat:
    """How a family writes the elements' tags.

    Attributes:
        prefixes: What may stand between `<` or `</` and an element's name.
        sections: Names, with prefix, of the element around the calls.
        special_tokens: Those of the markers that are special tokens of the family's tokenizers.
    """

    prefixes: tuple[str, ...]
    sections: tuple[str, ...]
    special_tokens: frozenset[str] = frozenset()

    def tags(self, name: str, *, is_end: bool = False) -> tuple[str, ...]:
        """Return the ways in which a tag of element `name` may begin."""
        return tuple(f"{'</' if is_end else '<'}{prefix}{name}" for prefix in self.prefixes)


_DSML = "\N{FULLWIDTH VERTICAL LINE}DSML\N{FULLWIDTH VERTICAL LINE}"
DSML = InvokeFormat(
    prefixes=(_DSML, f"{_DSML} "),
    sections=(f"{_DSML}function_calls", f"{_DSML}tool_calls", f"{_DSML} calls"),
    special_tokens=frozenset({_DSML}),
)
MINIMAX = InvokeFormat(
    prefixes=("",),
    sections=("minimax:tool_call",),
    special_tokens=frozenset({"<minimax:tool_call>", "</minimax:tool_call>"}),
)


class InvokeXmlCalls(Grammar):
    """A section of `<invoke name="…"><parameter name="…" string="true">value</parameter></invoke>`.

    The attribute `string` says whether a value is text or JSON; without it, the tool's schema does.
    """

    def __init__(self, form: InvokeFormat, tools: Tools = (), *, whole_calls: bool = False) -> None:
        super().__init__(tools, whole_calls=whole_calls)
        self.special_tokens = form.special_tokens
        self._sections = Markers(*(f"<{section}>" for section in form.sections), trim=True)
        self._section_ends = tuple(f"</{section}>" for section in form.sections)
        self._invoke, self._invoke_end = form.tags("invoke"), form.tags("invoke>", is_end=True)
        self._parameter = form.tags("parameter")
        self._value_end = Markers(*form.tags("parameter>", is_end=True))

    def run(self) -> Parse[None]:
        """Read the whole text."""
        ends = Markers(*self._section_ends)
        while opener := (yield from self.source.until(self._sections, self.output.content)):
            yield from self.attempt(self._section(), opener, ends)

    def _section(self) -> Parse[None]:
        yield from self.source.skip_space()
        while (yield from self.source.expect(*self._invoke, *self._section_ends)) in self._invoke:
            yield from self._call()
            yield from self.source.skip_space()

    def _call(self) -> Parse[None]:
        attributes, is_closed = yield from self._tag()
        name = attributes.get("name", "")
        if not name:
            raise Malformed
        self.output.begin(name)
        arguments = ArgumentsWriter(self.output.arguments)
        while not is_closed and (yield from self._has_parameter()):
            attributes, _ = yield from self._tag()
            key = attributes.get("name", "")
            arguments.open(key, self._types(name, key, attributes.get("string", "")))
            yield from self.source.up_to(self._value_end, arguments.text)
            arguments.close()
        arguments.end()
        self.output.end()

    def _has_parameter(self) -> Parse[bool]:
        yield from self.source.skip_space()
        return (yield from self.source.expect(*self._parameter, *self._invoke_end)) in self._parameter

    def _tag(self) -> Parse[tuple[dict[str, str], bool]]:
        """Read the rest of a tag; return its attributes, and whether it is an element of its own."""
        text, _ = yield from self.source.head(Markers(">"), NAME_CHARS_MAX)
        return dict(_ATTRIBUTE.findall(text)), text.endswith("/")

    def _types(self, name: str, key: str, string: str) -> Types:
        if not string:
            return self.tools.types(name, key)
        return TEXT if string == "true" else ANY
