"""JSON that is checked while it passes."""

from __future__ import annotations

import json

import pytest

from gateway.parsing.json_text import SCALAR_CHARS_MAX, json_value, short_json_string
from gateway.parsing.source import CutOff, Malformed, Source


def passed_on(text: str, *, cut: int = 1) -> str:
    """Return what `json_value` gives of a text that comes `cut` characters at a time."""
    source, given = Source(), []
    steps = json_value(source, given.append)
    for start in range(0, len(text), cut):
        source.feed(text[start : start + cut])
        try:
            next(steps)
        except StopIteration:
            return "".join(given)
    source.end()
    try:
        next(steps)
    except StopIteration:
        return "".join(given)
    raise AssertionError("the read waits after the text has ended")


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, -2.5e+3, true, null, {}], "b": {"c": "\\u00e9 \\" } ]"}}',
        "{ }",
        '{"a" : [ ] }',
        "17",
        '"x"',
    ],
)
def test_json_passes_as_it_is(text: str) -> None:
    """The model's own text comes out, to the character, and reads the same as the whole."""
    assert passed_on(text) == passed_on(text, cut=1000) == text


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 01}',
        '{"a": tru}',
        '{"a" 1}',
        '{"a": 1,}',
        "{'a': 1}",
        '{"a": 1]',
        '{"a": NaN}',
        "[1 2]",
        '{"a": .5}',
        "x",
    ],
)
def test_what_is_no_json_is_refused(text: str) -> None:
    """Nothing that a client could not parse may look complete."""
    with pytest.raises(Malformed):
        passed_on(text)


@pytest.mark.parametrize("text", ['{"a": "b', '{"a": [1, ', '{"a": "\\', '{"a": "\\u00', "{"])
def test_json_that_ends_too_early_is_cut_off(text: str) -> None:
    """A cut is told from a mistake."""
    with pytest.raises(CutOff):
        passed_on(text)


def test_plain_slips_in_strings_are_mended() -> None:
    """Raw control characters and unknown escapes mean what they say."""
    assert json.loads(passed_on('{"a": "x\ny\t\x01", "re": "\\d+\\u12 "}')) == {"a": "x\ny\t\x01", "re": "\\d+\\u12 "}


def test_an_endless_number_is_refused() -> None:
    """A number is held until it ends, so it must end."""
    with pytest.raises(Malformed):
        passed_on('{"a": ' + "1" * (SCALAR_CHARS_MAX + 1) + "}")


def test_a_short_string_has_a_longest_length() -> None:
    """A name is held until it ends, so it must end."""
    source = Source()
    source.feed('"' + "x" * 20)
    with pytest.raises(Malformed):
        next(short_json_string(source, 10))
