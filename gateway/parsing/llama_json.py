"""Llama 3's calls: a bare JSON object at the beginning of the answer, or one behind `<|python_tag|>`."""

from __future__ import annotations

from gateway.parsing.grammar import Grammar
from gateway.parsing.json_calls import call_object
from gateway.parsing.output import Output
from gateway.parsing.source import Markers, Parse, Source
from gateway.parsing.tool_schemas import ToolSchemas

PYTHON_TAG = "<|python_tag|>"
SEPARATORS = (";", ",")


class LlamaJsonCalls(Grammar):
    """Objects with a name and parameters.

    An object without the tag is a call only if it begins the answer and names a tool that was offered, for
    JSON may as well be the answer. Behind the tag, what is no object is content: code, or a built-in tool.
    """

    special_tokens = frozenset({PYTHON_TAG})

    def run(self) -> Parse[None]:
        """Read the whole text."""
        tag = Markers(PYTHON_TAG)
        if (yield from self.source.follows("{")):
            yield from self.attempt_bare(self._calls(), tag)
        while (yield from self.source.until(tag, self.output.content)):
            yield from self.attempt(self._calls(), "", tag)

    def _calls(self) -> Parse[None]:
        yield from self.source.skip_space()
        yield from call_objects(self.source, self.output, self.tools)


def call_objects(source: Source, output: Output, tools: ToolSchemas) -> Parse[None]:
    """Read one or more call objects, with nothing but a separator between them.

    Raises:
        Malformed: An object is no call of an offered tool, or none follows a separator.
        CutOff: The text ended within one.
    """
    while True:
        yield from call_object(source, output, is_name=tools.__contains__)
        if not (yield from source.follows("{", *SEPARATORS)):
            return
        yield from source.skip_space()
        yield from source.accept(*SEPARATORS)
        yield from source.skip_space()
