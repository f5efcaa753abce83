"""Families that write a call as a JSON object with a name and arguments, between markers of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from gateway.parsing.grammar import Grammar, Tools
from gateway.parsing.json_text import json_value, short_json_string, skip_json_space
from gateway.parsing.output import Output
from gateway.parsing.source import Malformed, Markers, Parse, Source, discard

NAMES = frozenset({"name", "tool_name"})
ARGUMENTS = frozenset({"arguments", "parameters"})
IDS = frozenset({"id", "tool_call_id"})
OTHERS = frozenset({"type", "function"})  # other members a call may have
FENCES = ("```json", "```")
STRAY_CHARS_MAX = 16  # closing brackets too many behind a call, a common slip; more is text
NAME_CHARS_MAX = 512  # OpenAI allows 64; a longer one is no name, and must not be held back

_STRAY = re.compile(r"[\]}]")


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """Where calls stand in a family's text.

    Attributes:
        openers: What comes before a call, or before a list of them; the list's bracket may be part of it.
        closers: What may come after.
        trim: Whether white space before an opener belongs to it.
        is_bare: Whether models of the family also write calls without markers, alone or in a code fence.
        special_tokens: Those of the markers that are special tokens of the family's tokenizers.
    """

    openers: tuple[str, ...]
    closers: tuple[str, ...]
    trim: bool = True
    is_bare: bool = False
    special_tokens: frozenset[str] = frozenset()


class JsonCalls(Grammar):
    """Content up to an opener, then objects or a list of them, then a closer, and so on.

    A call without markers counts only if it begins the answer and names a tool that was offered, for an
    answer may be JSON as well.
    """

    def __init__(self, form: JsonFormat, tools: Tools = (), *, whole_calls: bool = False) -> None:
        super().__init__(tools, whole_calls=whole_calls)
        self.special_tokens = form.special_tokens
        self._openers = Markers(*form.openers, trim=form.trim)
        self._closers = form.closers
        self._is_bare = form.is_bare
        self._ends = Markers(*(form.closers or form.openers))

    def run(self) -> Parse[None]:
        """Read the whole text."""
        if self._is_bare and (yield from self.source.follows("{", *FENCES)):
            yield from self.attempt_bare(self._bare_calls(), self._ends)
        while opener := (yield from self.source.until(self._openers, self.output.content)):
            yield from self.attempt(self._calls(opener), opener, self._ends)

    def _calls(self, opener: str) -> Parse[None]:
        yield from self.source.skip_space()
        yield from call_or_list(self.source, self.output, is_list=opener.endswith("["))
        while (yield from self.source.follows("{")):
            yield from self.source.skip_space()
            yield from call_object(self.source, self.output)
        yield from self.source.word(_STRAY, STRAY_CHARS_MAX)
        if self._closers and (yield from self.source.follows(*self._closers)):
            yield from self.source.skip_space()
            yield from self.source.accept(*self._closers)

    def _bare_calls(self) -> Parse[None]:
        while (yield from self.source.follows("{", *FENCES)):
            yield from self.source.skip_space()
            fence = yield from self.source.accept(*FENCES)
            yield from self.source.skip_space()
            yield from call_object(self.source, self.output, is_name=self.tools.__contains__)
            if fence:
                yield from self.source.skip_space()
                yield from self.source.expect(FENCES[-1])


def call_or_list(source: Source, output: Output, *, is_list: bool = False) -> Parse[None]:
    """Read one call object, or a list of them, whose bracket was read already if `is_list`.

    Raises:
        Malformed: It is neither.
        CutOff: The text ended before it was complete.
    """
    if not is_list and not (yield from source.accept("[")):
        yield from call_object(source, output)
        return
    while True:
        yield from skip_json_space(source, discard)
        yield from call_object(source, output)
        yield from skip_json_space(source, discard)
        if (yield from source.expect(",", "]")) == "]":
            return


def call_object(source: Source, output: Output, *, is_name: Callable[[str], bool] | None = None) -> Parse[None]:
    """Read one call: an object whose members are, in any order, a name, arguments and perhaps others.

    Arguments after the name are given as they arrive; before it they are kept until it is known.

    Args:
        source: Where to read.
        output: Where to give the call.
        is_name: Which names there are. If given, members that no call has end the attempt at once.

    Raises:
        Malformed: It is no call.
        CutOff: The text ended before it was complete.
    """
    yield from _Call(source, output, is_name).read()


class _Call:
    def __init__(self, source: Source, output: Output, is_name: Callable[[str], bool] | None) -> None:
        self._source = source
        self._output = output
        self._is_name = is_name
        self._name = ""
        self._id = ""
        self._kept: list[str] = []  # arguments that came before the name
        self._given = False

    def read(self) -> Parse[None]:
        source = self._source
        yield from source.expect("{")
        while True:
            yield from skip_json_space(source, discard)
            key = yield from self._short_string()
            yield from skip_json_space(source, discard)
            yield from source.expect(":")
            yield from skip_json_space(source, discard)
            yield from self._member(key)
            yield from skip_json_space(source, discard)
            if (yield from source.expect(",", "}")) == "}":
                break
        self._end()

    def _member(self, key: str) -> Parse[None]:
        if key in NAMES and not self._name:
            self._name = yield from self._short_string()
            if not self._name or (self._is_name and not self._is_name(self._name)):
                raise Malformed
        elif key in ARGUMENTS and not (self._given or self._kept):
            yield from self._arguments()
        elif key in IDS and (yield from self._source.is_next('"')):
            self._id = yield from self._short_string()
        elif self._is_name and key not in OTHERS | IDS:
            raise Malformed
        else:
            yield from json_value(self._source, discard)

    def _arguments(self) -> Parse[None]:
        char = yield from self._source.next_char()
        if char == "{":
            if self._name:
                self._given = True
                self._output.begin(self._name, self._id)
            give = self._output.arguments if self._name else self._kept.append
            yield from json_value(self._source, give)
            return
        yield from json_value(self._source, self._kept.append)
        self._kept = [_object_text("".join(self._kept))]

    def _end(self) -> None:
        if not self._name:
            raise Malformed
        if not self._given:
            self._output.begin(self._name, self._id)
            self._output.arguments("".join(self._kept) or "{}")
        self._output.end()

    def _short_string(self) -> Parse[str]:
        return (yield from short_json_string(self._source, NAME_CHARS_MAX))


def _object_text(text: str) -> str:
    """Return the object's text where a model wrote null, or the object once more as a string."""
    value = json.loads(text)
    if value is None:
        return "{}"
    try:
        is_object = isinstance(value, str) and isinstance(json.loads(value), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise Malformed
    return str(value)
