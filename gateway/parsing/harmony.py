"""gpt-oss's format, harmony: messages whose header says which channel they are on, and to whom they go."""

from __future__ import annotations

import re

from gateway.parsing.grammar import Grammar, Tools
from gateway.parsing.json_text import json_value
from gateway.parsing.source import CutOff, Give, Malformed, Markers, Parse, discard

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")

HEADER_CHARS_MAX = 1024  # a longer text without `<|message|>` is no header
FUNCTIONS = "functions."
TO_THE_USER = frozenset({"", "user", "assistant", "all"})

_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADER = re.compile(
    r"\s*(?:assistant)?(?:\s*to=[^\s<]*)?\s*"
    r"(?:<\|channel\|>\s*\w*(?:\s*to=[^\s<]*)?\s*(?:(?:<\|constrain\|>)?\s*\w*)?)?\s*"
)
_MARKUP = re.compile("|".join(map(re.escape, (CHANNEL, CONSTRAIN))))


class HarmonyParser(Grammar):
    """Reads messages: analysis is reasoning, what goes to `functions.x` a call, all else content.

    A message to a built-in tool, such as `python`, is left out. As a text may mention the tokens, a message
    ends only where the next one's header, or nothing, follows.

    Args:
        tools: The tools offered.
        prefix: What the prompt wrote of the message after its last `<|start|>` and the role.
        whole_calls: See `Grammar`.
    """

    special_tokens = frozenset({START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS})

    def __init__(self, tools: Tools = (), *, prefix: str = "", whole_calls: bool = False) -> None:
        super().__init__(tools, whole_calls=whole_calls)
        self.source.feed(prefix)

    def run(self) -> Parse[None]:
        """Read the whole text."""
        while (yield from self.source.peek()):
            yield from self._message()

    def _message(self) -> Parse[None]:
        header = yield from self._header()
        if header is None:
            return
        channel, recipient = (_CHANNEL.findall(header) or [""])[-1], (_RECIPIENT.findall(header) or [""])[-1]
        name = recipient.removeprefix(FUNCTIONS)
        if name != recipient or name in self.tools:
            yield from self.attempt(self._call(name), "", Markers(START))
        elif recipient not in TO_THE_USER:
            yield from self._body(discard)
        else:
            yield from self._body(self.output.reasoning if channel == "analysis" else self.output.content)

    def _header(self) -> Parse[str | None]:
        """Read a header; a text that is none is content."""
        try:
            text, mark = yield from self.source.head(Markers(START, MESSAGE, *ENDS), HEADER_CHARS_MAX)
        except CutOff:
            text, mark = self.source.rest(), ""
        except Malformed:
            yield from self._body(self.output.content)
            return None
        if mark == MESSAGE:
            return text
        if not _HEADER.fullmatch(text):
            self.output.content(_MARKUP.sub("", text))
        return None

    def _call(self, name: str) -> Parse[None]:
        yield from self.source.skip_space()
        if (yield from self.source.next_char()) != "{":
            raise Malformed
        self.output.begin(name)
        yield from json_value(self.source, self.output.arguments)
        if not (yield from self.source.follows(*ENDS, START, end=True)):
            raise Malformed
        self.output.end()
        yield from self._body(discard)

    def _body(self, give: Give) -> Parse[None]:
        ends = Markers(*ENDS)
        while end := (yield from self.source.until(ends, give)):
            if (yield from self.source.follows(START, CHANNEL, end=True)):
                return
            give(end)
