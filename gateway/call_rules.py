"""Rules of a grammar for calls of the tools that are offered, in a family's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.call_formats import CallFormat, ParameterFormat
from gateway.chat_request import Tool
from gateway.grammar import json_piece
from gateway.grammar_writer import GrammarWriter, Parts, optional, repeated
from gateway.openai_errors import invalid_value
from gateway.parsing.tool_schemas import ToolSchemas

NO_ARGUMENTS: Mapping[str, Any] = {"properties": {}, "additionalProperties": False}
"""What a tool that names no parameters takes, as OpenAI has it."""


def write_calls(writer: GrammarWriter, form: CallFormat, offered: Sequence[Tool], *, many: bool) -> Parts:
    """One call, or several.

    White space that stands between calls may also come after the last: a model that has written it is not bound to
    call again, and many write it before they end.
    """
    whole = [*writer.literals(form.opener), *write_opened_calls(writer, form, offered, many=many)]
    if not many or not form.wraps_each or form.separator is None:
        return whole
    separator = writer.literals(*form.separator)
    trailing = optional(separator) if "".join(form.separator).isspace() else []
    return [*repeated(whole, separator), *trailing]


def write_opened_calls(writer: GrammarWriter, form: CallFormat, offered: Sequence[Tool], *, many: bool) -> Parts:
    """What follows the opener: one call, or all where one opener is for all; and the closer."""
    alternatives = [_write_call(writer, form, tool, index) for index, tool in enumerate(offered)]
    call = writer.add_rule("call", *alternatives)
    if many and not form.wraps_each and form.separator is not None:
        call = repeated(call, writer.literals(*form.separator))
    return [*writer.literals(*form.lead), *call, *writer.literals(*form.closer)]


def _write_call(writer: GrammarWriter, form: CallFormat, tool: Tool, index: int) -> Parts:
    if form.parameter is None:
        schema = {"type": "object", **(tool.parameters or NO_ARGUMENTS)}
        arguments = writer.add_piece(json_piece(f"args_{index}", schema, strict=tool.strict))
    else:
        arguments = _write_parameters(writer, form.parameter, tool, index)
    return [*writer.literals(*form.before_call(tool.name)), *arguments, *writer.literals(*form.after)]


def _write_parameters(writer: GrammarWriter, form: ParameterFormat, tool: Tool, index: int) -> Parts:
    """Each argument on its own, in the schema's order; those that are not required may be left out."""
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required")
    parts: Parts = []
    for place, key in enumerate(properties if isinstance(properties, Mapping) else ()):
        if any(char in '<>"\n' for char in key):
            raise invalid_value("tools", f"a call of {tool.name} cannot be enforced: {key!r} cannot be written in it")
        value = _write_value(writer, form, tool, key, f"value_{index}_{place}")
        argument = writer.add_rule(f"argument_{index}_{place}", [*writer.literals(*form.before_value(key)), *value])
        is_required = isinstance(required, list) and key in required
        parts += argument if is_required else optional(argument)
    return parts


def _write_value(writer: GrammarWriter, form: ParameterFormat, tool: Tool, key: str, name: str) -> Parts:
    """Text up to the argument's end, or JSON of its schema, and the end."""
    schema = tool.parameters["properties"][key]
    types = ToolSchemas([{"name": tool.name, "parameters": tool.parameters}]).types(tool.name, key)
    end = writer.literals(*form.end)
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and choices and all(isinstance(choice, str) and choice for choice in choices):
        return [*writer.add_rule(name, *(writer.literals(choice) for choice in choices)), *end]
    if "string" in types:
        return writer.until(*form.end)
    definitions = {word: tool.parameters[word] for word in ("$defs", "definitions") if word in tool.parameters}
    return [*writer.add_piece(json_piece(name, {**definitions, **schema}, strict=tool.strict)), *end]
