"""Checks of JSON values in hand: the value in its type, or a 400 that names its path and the limit.

`gateway.openai_fields` reads fields that may be absent; these are for what must be there, and for what is in lists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gateway.openai_errors import invalid_type, invalid_value, missing, quoted
from gateway.openai_fields import Body
from gateway.openai_schema import MODEL_CHARS_MAX
from gateway.parameter_table import METADATA_KEY_CHARS_MAX, METADATA_PAIRS_MAX, METADATA_VALUE_CHARS_MAX

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]+")
FUNCTION_NAME_CHARS_MAX = 64
"""As OpenAI's specification has it."""
ID_CHARS_MAX = 256
"""Longer than any server's ids; they are echoed and looked up."""


def required(body: Body, name: str, path: str) -> object:
    """A field that must be there and not be null.

    Raises:
        ApiError: 400.
    """
    value = body.get(name)
    if value is None:
        raise missing(path)
    return value


def check_string(value: object, path: str, *, chars_max: int | None = None, chars_min: int = 0) -> str:
    """A string.

    Raises:
        ApiError: 400.
    """
    if not isinstance(value, str):
        raise invalid_type(path, "a string", value)
    if chars_max is not None and not chars_min <= len(value) <= chars_max:
        raise invalid_value(path, f"expected {chars_min} to {chars_max} characters, got {len(value)}")
    return value


def check_choice(value: object, path: str, choices: Sequence[str]) -> str:
    """One of a few strings.

    Raises:
        ApiError: 400.
    """
    text = check_string(value, path)
    if text not in choices:
        raise invalid_value(path, f"{quoted(text)} is not one of {', '.join(choices)}")
    return text


def check_object(value: object, path: str) -> dict[str, Any]:
    """An object.

    Raises:
        ApiError: 400.
    """
    if not isinstance(value, dict):
        raise invalid_type(path, "an object", value)
    return value


def check_array(value: object, path: str, *, items_max: int) -> list[Any]:
    """An array.

    Raises:
        ApiError: 400.
    """
    if not isinstance(value, list):
        raise invalid_type(path, "an array", value)
    if len(value) > items_max:
        raise invalid_value(path, f"at most {items_max} items, got {len(value)}")
    return value


def check_function_name(value: object, path: str, *, chars_max: int = FUNCTION_NAME_CHARS_MAX) -> str:
    """The name of a function.

    Raises:
        ApiError: 400.
    """
    if value is None:
        raise missing(path)
    name = check_string(value, path)
    if len(name) > chars_max or not FUNCTION_NAME.fullmatch(name):
        raise invalid_value(path, f"expected 1 to {chars_max} letters, digits, underscores or dashes")
    return name


def read_model(body: Body) -> str:
    """The name of the model, which every call gives.

    Raises:
        ApiError: 400.
    """
    return check_string(required(body, "model", "model"), "model", chars_max=MODEL_CHARS_MAX, chars_min=1)


def read_metadata(value: object) -> dict[str, str]:
    """Pairs of strings; none for null.

    Raises:
        ApiError: 400.
    """
    metadata = {} if value is None else check_object(value, "metadata")
    if len(metadata) > METADATA_PAIRS_MAX:
        raise invalid_value("metadata", f"at most {METADATA_PAIRS_MAX} pairs")
    for key, text in metadata.items():
        if len(key) > METADATA_KEY_CHARS_MAX:
            raise invalid_value("metadata", f"keys have at most {METADATA_KEY_CHARS_MAX} characters")
        check_string(text, f"metadata.{key}", chars_max=METADATA_VALUE_CHARS_MAX)
    return metadata
