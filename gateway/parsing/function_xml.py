"""Qwen3-Coder's calls, which look like XML, and those of families that took the format over."""

from __future__ import annotations

from gateway.parsing.arguments import ArgumentsWriter
from gateway.parsing.grammar import Grammar, Tools
from gateway.parsing.json_calls import NAME_CHARS_MAX
from gateway.parsing.source import Malformed, Markers, Parse

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class FunctionXmlCalls(Grammar):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    Values are raw text, typed by the tool's schema, less one newline at either end. As values may show
    the very tags, an end counts only where another tag follows it. A value whose end the model left
    out ends before the next parameter, or the function's end, at the beginning of a line. Also the call's
    opener may be missing, if the function is one that was offered.

    Args:
        tools: The tools offered.
        opener: The tag around a call.
        closer: Its end.
        whole_calls: See `Grammar`.
    """

    special_tokens = frozenset({"<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>"})

    def __init__(
        self,
        tools: Tools = (),
        *,
        opener: str = "<tool_call>",
        closer: str = "</tool_call>",
        whole_calls: bool = False,
    ) -> None:
        super().__init__(tools, whole_calls=whole_calls)
        self._opener, self._closer = opener, closer

    def run(self) -> Parse[None]:
        """Read the whole text."""
        openers, ends = Markers(self._opener, FUNCTION, trim=True), Markers(self._closer)
        while opener := (yield from self.source.until(openers, self.output.content)):
            yield from self.attempt(self._call(is_bare=opener == FUNCTION), opener, ends)

    def _call(self, *, is_bare: bool) -> Parse[None]:
        if not is_bare:
            yield from self.source.skip_space()
            yield from self.source.expect(FUNCTION)
        name, _ = yield from self.source.head(Markers(">"), NAME_CHARS_MAX)
        name = name.strip()
        if not name or (is_bare and name not in self.tools):
            raise Malformed
        self.output.begin(name)
        arguments = ArgumentsWriter(self.output.arguments)
        yield from self._parameters(name, arguments)
        arguments.end()
        self.output.end()
        if (yield from self.source.follows(self._closer)):
            yield from self.source.skip_space()
            yield from self.source.accept(self._closer)

    def _parameters(self, name: str, arguments: ArgumentsWriter) -> Parse[None]:
        tag = yield from self._next_tag()
        while tag == PARAMETER:
            key, _ = yield from self.source.head(Markers(">"), NAME_CHARS_MAX)
            arguments.open(key.strip(), self.tools.types(name, key.strip()))
            yield from self.source.accept("\n")
            next_tag = yield from self._value(arguments)
            arguments.close()
            tag = next_tag or (yield from self._next_tag())

    def _next_tag(self) -> Parse[str]:
        yield from self.source.skip_space()
        return (yield from self.source.expect(PARAMETER, FUNCTION_END))

    def _value(self, arguments: ArgumentsWriter) -> Parse[str]:
        """Read a value and its end; return the tag that came instead of an end of its own."""
        ends = Markers("\n" + PARAMETER_END, PARAMETER_END, "\n" + PARAMETER, "\n" + FUNCTION_END)
        while True:
            end = yield from self.source.up_to(ends, arguments.text)
            if end.endswith(PARAMETER_END):
                if (yield from self.source.follows(PARAMETER, FUNCTION_END, self._closer, end=True)):
                    return ""
            elif end.endswith(PARAMETER) or (yield from self.source.follows(self._closer, end=True)):
                return end.removeprefix("\n")
            arguments.text(end)
