"""What the content must match, in every spelling that clients use.

OpenAI's `response_format`; vLLM's `structured_outputs` and the older `guided_…`; llama.cpp's `json_schema` and
`grammar`; sglang's `regex` and `ebnf`. At most one may be given.
"""

from __future__ import annotations

from typing import Any

from gateway.chat_request import FormatAsked, FormatKind
from gateway.openai_errors import invalid_type, invalid_value, missing, quoted
from gateway.openai_fields import Body, read_boolean, read_list, read_object, read_string
from gateway.openai_tools import DESCRIPTION_CHARS_MAX, read_name

CHOICE_TEXTS_MAX = 1024
GRAMMAR_TEXT_CHARS_MAX = 64 * 1024
"""Of a grammar or an expression, as given: what fits into a message between machines, with room."""

FLAT: dict[str, FormatKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "json_schema": "json_schema",
    "grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}
"""Top-level parameters of other servers. Neutral ones, empty or false, ask for nothing."""
NESTED: dict[str, FormatKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}
"""Members of `structured_outputs`."""


def read_format(body: Body) -> FormatAsked:
    """What the content must match.

    Raises:
        ApiError: 400 that names the parameter at fault, also when two ask for different things.
    """
    asked = [_read_response_format(body)]
    nested = read_object(body, "structured_outputs") or {}
    asked += [_read_value(nested, name, kind, f"structured_outputs.{name}") for name, kind in NESTED.items()]
    unknown = next((name for name in nested if name not in NESTED and nested[name] is not None), None)
    if unknown is not None:
        raise invalid_value("structured_outputs", f"{quoted(unknown)} is not one of {', '.join(NESTED)}")
    asked += [_read_value(body, name, kind, name) for name, kind in FLAT.items()]
    found = [one for one in asked if one is not None]
    if len(found) > 1:
        raise invalid_value(found[1].param, f"only one format may be asked for, and there is {found[0].param} already")
    return found[0] if found else FormatAsked()


def _read_response_format(body: Body) -> FormatAsked | None:
    value = read_object(body, "response_format")
    if value is None:
        return None
    kind = value.get("type")
    if kind is None:
        raise missing("response_format.type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = read_object(value, "schema", path="response_format.schema")  # llama.cpp's way to give one
        if schema is None:
            return FormatAsked(kind="json_object")
        return FormatAsked(kind="json_schema", value=schema, param="response_format.schema")
    if kind != "json_schema":
        raise invalid_value("response_format.type", f"{quoted(kind)} is not one of text, json_object, json_schema")
    return _read_json_schema(value)


def _read_json_schema(value: dict[str, Any]) -> FormatAsked:
    path = "response_format.json_schema"
    form = read_object(value, "json_schema", path=path)
    if form is None:
        raise missing(path)
    read_name(form, f"{path}.name")
    read_string(form, "description", path=f"{path}.description", chars_max=DESCRIPTION_CHARS_MAX)
    strict = read_boolean(form, "strict", default=True, path=f"{path}.strict")
    schema = read_object(form, "schema", path=f"{path}.schema")
    if schema is None:
        raise missing(f"{path}.schema")
    if schema.get("type", "object") != "object":
        raise invalid_value(f"{path}.schema", "expected a schema of type 'object'")
    return FormatAsked(kind="json_schema", value=schema, param=f"{path}.schema", strict=strict)


def _read_value(body: Body, name: str, kind: FormatKind, path: str) -> FormatAsked | None:
    """A format that a field asks for; None where it is absent or neutral."""
    value = body.get(name)
    if value is None or value is False or value in ("", {}):
        return None
    match kind:
        case "json_object":
            return FormatAsked(kind=kind, param=path) if read_boolean(body, name, path=path) else None
        case "json_schema":
            return FormatAsked(kind=kind, value=_read_schema(value, path), param=path)
        case "choice":
            return FormatAsked(kind=kind, value=_read_choices(body, name, path), param=path)
        case _:
            text = read_string(body, name, path=path, chars_max=GRAMMAR_TEXT_CHARS_MAX)
            return FormatAsked(kind=kind, value=text, param=path)


def _read_schema(value: object, path: str) -> object:
    """A schema, or JSON text that holds one; whether it is one is for the grammar compiler to say."""
    if not isinstance(value, dict | str):
        raise invalid_type(path, "an object, or a string that holds one", value)
    return value


def _read_choices(body: Body, name: str, path: str) -> tuple[str, ...]:
    choices = read_list(body, name, CHOICE_TEXTS_MAX, path=path) or []
    if not choices:
        raise invalid_value(path, "at least one choice is required", code="empty_array")
    for index, choice in enumerate(choices):
        if not isinstance(choice, str):
            raise invalid_type(f"{path}[{index}]", "a string", choice)
        if not choice:
            raise invalid_value(path, "a choice must not be empty")
    return tuple(dict.fromkeys(choices))
