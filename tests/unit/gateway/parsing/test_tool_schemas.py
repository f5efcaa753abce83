"""Arguments written as plain text, typed by a tool's schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.parsing.arguments import ArgumentsWriter
from gateway.parsing.tool_schemas import ANY, TEXT, ToolSchemas, argument_json


def types_of(schema: dict[str, Any], **more: Any) -> frozenset[str]:
    """Return the types that a tool with one argument of this schema allows for it."""
    parameters = {"type": "object", "properties": {"a": schema}, **more}
    return ToolSchemas([{"type": "function", "function": {"name": "f", "parameters": parameters}}]).types("f", "a")


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, {"array", "null"}),
        ({"type": "number", "nullable": True}, {"number", "null"}),
        ({"enum": ["c", "f"]}, {"string"}),
        ({"enum": [1, None, True, [], {}]}, {"number", "null", "boolean", "array", "object"}),
        ({"const": 3}, {"number"}),
        ({}, {"string"}),
    ],
)
def test_the_types_a_schema_allows(schema: dict[str, Any], types: set[str]) -> None:
    """Unions count together; a schema that says nothing allows text."""
    assert types_of(schema) == types


def test_references_are_followed_and_may_go_in_circles() -> None:
    """Schemas made by pydantic keep their models under `$defs`."""
    definitions = {"P": {"type": "object"}, "L": {"anyOf": [{"$ref": "#/$defs/L"}, {"type": "null"}]}}
    assert types_of({"$ref": "#/$defs/P"}, **{"$defs": definitions}) == {"object"}
    assert types_of({"$ref": "#/$defs/L"}, **{"$defs": definitions}) == {"null"}
    assert types_of({"$ref": "#/$defs/none"}) == {"string"}


def test_of_an_unknown_tool_every_argument_is_text() -> None:
    """Nothing is guessed about a tool that was not offered."""
    assert ToolSchemas([]).types("f", "a") == TEXT


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("3", {"integer"}, 3),
        ("3.0", {"integer"}, 3),
        ("007", {"integer"}, 7),
        ("3.5", {"integer"}, "3.5"),
        ("1e20", {"number"}, 1e20),
        ("-2.5", {"number"}, -2.5),
        ("NaN", {"number"}, "NaN"),
        ("True", {"boolean"}, True),
        ("false", {"boolean"}, False),
        ("yes", {"boolean"}, "yes"),
        ("None", {"string", "null"}, None),
        ("null", {"string"}, "null"),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("{'a': True}", {"object"}, {"a": True}),
        ('{"a": NaN}', {"object"}, '{"a": NaN}'),
        ("[1, 2]", {"object"}, "[1, 2]"),
        ("[1", {"array"}, "[1"),
        ("{1: {2}}", {"object"}, "{1: {2}}"),
        ("café", {"string", "integer"}, "café"),
        ("12", ANY, 12),
    ],
)
def test_a_text_becomes_the_value_it_can_be(text: str, types: set[str], value: Any) -> None:
    """What fits no allowed type stays the text it is."""
    decoded = json.loads(argument_json(text, frozenset(types)))
    assert decoded == value
    assert type(decoded) is type(value)


def test_text_is_given_as_it_arrives_and_other_values_when_they_end() -> None:
    """Only a value that cannot be anything but text may be given early."""
    given: list[str] = []
    writer = ArgumentsWriter(given.append)
    writer.open("a", TEXT)
    writer.text('say "')
    assert "".join(given) == '{"a": "say \\"'
    writer.close()
    writer.open("n", frozenset({"integer"}))
    writer.text("1")
    assert "".join(given).endswith('"n": ')
    writer.text("2")
    writer.close()
    writer.end()
    assert json.loads("".join(given)) == {"a": 'say "', "n": 12}


def test_nullable_text_waits_only_while_it_may_be_null() -> None:
    """Five characters tell a text from `null`."""
    given: list[str] = []
    writer = ArgumentsWriter(given.append)
    writer.open("a", frozenset({"string", "null"}))
    writer.text("null")
    assert "".join(given) == '{"a": '
    writer.text("a")
    assert "".join(given) == '{"a": "nulla'
