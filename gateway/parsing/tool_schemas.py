"""What the offered tools' schemas say of their arguments, and the JSON of an argument written as plain text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.parsing.python_literal import python_json

Types = frozenset[str]
TEXT: Types = frozenset({"string"})
NULLABLE_TEXT: Types = frozenset({"string", "null"})
ANY: Types = frozenset({"null", "boolean", "number", "object", "array", "string"})

SCHEMA_DEPTH_MAX = 16  # references may go in circles

_INTEGER = re.compile(r"[+-]?\d+(?:\.0+)?", re.ASCII)
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_WORDS = {
    "true": ("boolean", "true"),
    "false": ("boolean", "false"),
    "null": ("null", "null"),
    "none": ("null", "null"),
}


class ToolSchemas:
    """The offered tools by name.

    Args:
        tools: As OpenAI's API has them; a bare function object will do.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = (tool.get("function", tool) for tool in tools)
        self._parameters = {
            function["name"]: function.get("parameters") or {} for function in functions if function.get("name")
        }

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def types(self, name: str, key: str) -> Types:
        """Return the JSON types that tool `name` allows for argument `key`; `string` where it says nothing."""
        root = self._parameters.get(name, {})
        properties = root.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        if schema is None:
            schema = root.get("additionalProperties")
        return frozenset(_types(schema, root, SCHEMA_DEPTH_MAX)) or TEXT


def argument_json(text: str, types: Types) -> str:
    """Return the JSON of an argument that a model wrote as `text`, a value of one of `types` if it can be one.

    Python's spelling of constants and containers counts too. A text that is of no allowed type is a string.
    """
    stripped = text.strip()
    kind, word = _WORDS.get(stripped.lower(), ("", ""))
    if kind in types:
        return word
    if types & {"integer", "number"} and (number := _number(stripped, types)):
        return number
    if types & {"object", "array"} and (container := _container(stripped, types)):
        return container
    return json.dumps(text, ensure_ascii=False)


def _number(text: str, types: Types) -> str:
    if _INTEGER.fullmatch(text) and "integer" in types and "number" not in types:
        return str(int(text.partition(".")[0])) if len(text) <= 4000 else ""
    if "number" not in types:
        return text if _JSON_NUMBER.fullmatch(text) and "." not in text else ""
    return text if _JSON_NUMBER.fullmatch(text) else ""


def _container(text: str, types: Types) -> str:
    if text[:1] not in ("{", "["):
        return ""
    kind = {"{": "object", "[": "array"}[text[0]]
    if kind not in types:
        return ""
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return python_json(text)
    return text


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _types(schema: object, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return
    declared = schema.get("type")
    yield from [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else ()
    if schema.get("nullable") is True:
        yield "null"
    for word in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(word) or ():
            yield from _types(choice, root, depth - 1)
    if isinstance(reference := schema.get("$ref"), str):
        yield from _types(_resolve(reference, root), root, depth - 1)
    if declared is None:
        values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
        yield from map(_type_of, values)


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    found: object = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float) and math.isfinite(value):
        return "number"
    if isinstance(value, Mapping):
        return "object"
    return "array" if isinstance(value, list) else "string"
