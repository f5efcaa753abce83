"""Llama 3's calls: a bare JSON object at the beginning of the answer, or one behind `<|python_tag|>`."""

from gateway.parsing.grammar import Grammar
from gateway.parsing.json_calls import call_object
from gateway.parsing.source import Malformed, Markers, Parse

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
        while True:
            yield from self.source.skip_space()
            yield from call_object(self.source, self.output, is_name=self.tools.__contains__)
            if not (yield from self.source.follows("{", *SEPARATORS)):
                return
            yield from self.source.skip_space()
            if (yield from self.source.accept(*SEPARATORS)) and not (yield from self.source.follows("{")):
                raise Malformed
