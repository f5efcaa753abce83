"""Python literals read while they arrive, and given as JSON."""

from __future__ import annotations

import json
import re

from gateway.parsing.json_text import escaped
from gateway.parsing.source import CutOff, Give, Malformed, Parse, Source

NESTING_MAX = 64
WORD_CHARS_MAX = 512  # a number or a constant

_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_WORD_CHAR = re.compile(r"[\w.+-]")
_INTEGER = re.compile(r"[+-]?(?:0|[1-9]\d*)", re.ASCII)
_FLOAT = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def python_value(source: Source, give: Give, depth: int = NESTING_MAX) -> Parse[None]:
    """Read a literal and give its JSON: numbers, strings, constants, lists, tuples and dicts.

    Raises:
        Malformed: The text is no such literal, or nested too deep; what was given stands.
        CutOff: The text ended within the literal.
    """
    if depth == 0:
        raise Malformed
    yield from source.skip_space()
    char = yield from source.next_char()
    if char in "'\"":
        yield from python_string(source, give)
    elif char in _CLOSERS:
        source.take(1)
        yield from _container(source, give, char, depth - 1)
    else:
        give(_word((yield from source.word(_WORD_CHAR, WORD_CHARS_MAX))))


def python_json(text: str) -> str:
    """Return the JSON of a text that is one literal; an empty text if it is not."""
    source, parts = Source(), list[str]()
    source.feed(text)
    source.end()
    try:
        for _ in python_value(source, parts.append):
            pass
    except (Malformed, CutOff):
        return ""
    return "" if source.rest().strip() else "".join(parts)


def python_string(source: Source, give: Give) -> Parse[None]:
    """Read a string in single or double quotes and give it as a JSON string.

    Raises:
        Malformed: No string begins here, or an escape has no digits.
        CutOff: The text ended within the string.
    """
    quote = yield from source.expect("'", '"')
    give('"')
    while True:
        if text := source.match(_PLAIN[quote]):
            give(escaped(text))
        elif (yield from source.next_char()) == quote:
            source.take(1)
            give('"')
            return
        elif (yield from source.is_next("\\")):
            give(escaped((yield from _escape(source))))


def _container(source: Source, give: Give, opener: str, depth: int) -> Parse[None]:
    closer = _CLOSERS[opener]
    is_dict = opener == "{"
    give("{" if is_dict else "[")
    separator = ""
    yield from source.skip_space()
    while not (yield from source.accept(closer)):
        give(separator)
        if is_dict:
            yield from python_string(source, give)
            yield from source.skip_space()
            yield from source.expect(":")
            give(": ")
        yield from python_value(source, give, depth)
        separator = ", "
        yield from source.skip_space()
        if not (yield from source.is_next(closer)):
            yield from source.expect(",", closer)
            yield from source.skip_space()
    give("}" if is_dict else "]")


def _escape(source: Source) -> Parse[str]:
    pair = yield from source.peek(2)
    if len(pair) < 2:
        raise CutOff
    source.take(2)
    char = pair[1]
    if char in _HEX_DIGITS:
        digits = yield from source.peek(_HEX_DIGITS[char])
        if len(digits) < _HEX_DIGITS[char]:
            raise CutOff
        source.take(len(digits))
        return _character(digits)
    if char in "\\'\"":
        return char
    return _ESCAPES.get(char, pair)


def _character(digits: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]+", digits) or int(digits, 16) > 0x10FFFF:
        raise Malformed
    return chr(int(digits, 16))


def _word(text: str) -> str:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        return text.removeprefix("+")
    if _FLOAT.fullmatch(text) and abs(value := float(text)) != float("inf"):
        return json.dumps(value)
    raise Malformed
