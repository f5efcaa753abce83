"""JSON read while it arrives: passed on as it is, and checked, so that what comes out is JSON."""

from __future__ import annotations

import json
import re

from gateway.parsing.source import CutOff, Give, Malformed, Parse, Source

SCALAR_CHARS_MAX = 512  # no number that means anything is longer

_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_PLAIN_CHAR = re.compile(r'[^"\\\x00-\x1f]')
_SCALAR_CHARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", re.ASCII)
_UNICODE_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{4}")
_CONTROLS = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


def json_value(source: Source, give: Give) -> Parse[None]:
    """Read one JSON value and give its text.

    Two slips of models are mended, for the string's meaning is plain: a control character written as it
    is, and a backslash before a character that JSON does not escape.

    Raises:
        Malformed: The text is not JSON; it was read, and given, up to the offending character.
        CutOff: The text ended within the value.
    """
    closers: list[str] = []
    while True:
        closer = yield from _start_of_value(source, give)
        if closer:
            closers.append(closer)
            if (yield from source.next_char()) != closer:
                if closer == "}":
                    yield from _key(source, give)
                continue
            give(source.take(1))
            closers.pop()
        if not (yield from _is_more(source, give, closers)):
            return


def escaped(text: str) -> str:
    """Return text as it stands between the quotes of a JSON string; pieces may be escaped one by one."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def short_json_string(source: Source, chars_max: int) -> Parse[str]:
    """Read one JSON string and return what it stands for.

    Raises:
        Malformed: No string begins here, or it has more than `chars_max` characters as written.
        CutOff: The text ended within the string.
    """
    parts: list[str] = []

    def keep(text: str) -> None:
        if len(parts) > chars_max:
            raise Malformed
        parts.append(text)

    yield from json_string(source, keep, plain=_PLAIN_CHAR)
    return str(json.loads("".join(parts)))


def json_string(source: Source, give: Give, *, plain: re.Pattern[str] = _PLAIN) -> Parse[None]:
    """Read one JSON string, quotes included, and give its text, mended as `json_value` does.

    Args:
        source: Where to read.
        give: Takes the text.
        plain: What to give at once of characters that stand for themselves.

    Raises:
        Malformed: No string begins here.
        CutOff: The text ended within the string.
    """
    if (yield from source.next_char()) != '"':
        raise Malformed
    give(source.take(1))
    while True:
        if text := source.match(plain):
            give(text)
            continue
        char = yield from source.peek()
        if not char:
            raise CutOff
        if char == '"':
            give(source.take(1))
            return
        if char == "\\":
            give((yield from _escape(source)))
        elif char < " ":
            source.take(1)
            give(_CONTROLS.get(char, f"\\u{ord(char):04x}"))


def skip_json_space(source: Source, give: Give) -> Parse[None]:
    """Read white space and give it; stop at the next other character.

    Raises:
        CutOff: The text ended.
    """
    while (yield from source.next_char()) in " \t\r\n":
        give(source.match(_SPACE))


def _start_of_value(source: Source, give: Give) -> Parse[str]:
    """Read a scalar, or an opening bracket and the space after it; return the bracket's partner."""
    yield from skip_json_space(source, give)
    char = yield from source.next_char()
    if char in "{[":
        give(source.take(1))
        yield from skip_json_space(source, give)
        return "}" if char == "{" else "]"
    if char == '"':
        yield from json_string(source, give)
    else:
        yield from _scalar(source, give)
    return ""


def _is_more(source: Source, give: Give, closers: list[str]) -> Parse[bool]:
    """After a value, read all that closes here; return whether another value follows."""
    while closers:
        yield from skip_json_space(source, give)
        char = yield from source.next_char()
        if char not in (closers[-1], ","):
            raise Malformed
        give(source.take(1))
        if char == ",":
            yield from skip_json_space(source, give)
            if closers[-1] == "}":
                yield from _key(source, give)
            return True
        closers.pop()
    return False


def _key(source: Source, give: Give) -> Parse[None]:
    yield from json_string(source, give)
    yield from skip_json_space(source, give)
    if (yield from source.next_char()) != ":":
        raise Malformed
    give(source.take(1))


def _scalar(source: Source, give: Give) -> Parse[None]:
    text = ""
    while (char := (yield from source.peek())) and char in _SCALAR_CHARS:
        text += source.take(1)
        if len(text) > SCALAR_CHARS_MAX:
            raise Malformed
    if not _SCALAR.fullmatch(text):
        raise Malformed
    give(text)


def _escape(source: Source) -> Parse[str]:
    pair = yield from source.peek(2)
    if len(pair) < 2:
        raise CutOff
    if pair[1] in '"\\/bfnrt':
        return source.take(2)
    if pair[1] == "u":
        escape = yield from source.peek(6)
        if _UNICODE_ESCAPE.fullmatch(escape):
            return source.take(6)
        if len(escape) < 6:
            raise CutOff
    source.take(1)
    return "\\\\"
