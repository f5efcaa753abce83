"""Readers of a JSON body's fields, one for each type: the value, or a 400 that names the field.

A field that is null counts as absent, as OpenAI's own servers have it: many clients send every field they know.
`path` is the name that messages use where it differs from the key, as for a field within an object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.openai_errors import invalid_type, invalid_value, quoted

Body = Mapping[str, object]


def read_number(body: Body, name: str, low: float, high: float) -> float | None:
    """A number within bounds, both allowed; an integer reads as a float.

    Raises:
        ApiError: 400.
    """
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid_type(name, "a number", value)
    if not low <= value <= high:
        raise invalid_value(name, f"expected {low:g} to {high:g}, got {quoted(value)}")
    return float(value)


def read_positive_number(body: Body, name: str, high: float, *, hint: str = "") -> float | None:
    """A number above 0 and up to a bound.

    Args:
        body: The JSON object.
        name: The field.
        high: The bound, allowed.
        hint: What to do instead of 0, for the message.

    Raises:
        ApiError: 400.
    """
    value = read_number(body, name, 0.0, high)
    if value == 0:
        raise invalid_value(name, f"expected more than 0 and at most {high:g}, got 0{hint}")
    return value


def read_integer(body: Body, name: str, low: int, high: int) -> int | None:
    """An integer within bounds, both allowed.

    Raises:
        ApiError: 400.
    """
    value = body.get(name)
    return None if value is None else check_integer(name, value, low, high)


def check_integer(path: str, value: object, low: int, high: int) -> int:
    """The same of a value in hand, which may not be null.

    Raises:
        ApiError: 400.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_type(path, "an integer", value)
    if not low <= value <= high:
        raise invalid_value(path, f"expected an integer from {low} to {high}, got {quoted(value)}")
    return value


def read_boolean(body: Body, name: str, *, default: bool = False, path: str | None = None) -> bool:
    """True or false.

    Raises:
        ApiError: 400.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid_type(path or name, "a boolean", value)
    return value


def read_string(body: Body, name: str, *, path: str | None = None, chars_max: int | None = None) -> str | None:
    """A string, bounded where a bound is given.

    Raises:
        ApiError: 400.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise invalid_type(path or name, "a string", value)
    if chars_max is not None and len(value) > chars_max:
        raise invalid_value(path or name, f"at most {chars_max} characters, got {len(value)}")
    return value


def read_word(body: Body, name: str, words: Sequence[str]) -> str:
    """One of a few words; the first where there is none.

    Raises:
        ApiError: 400.
    """
    value = read_string(body, name)
    if value is None:
        return words[0]
    if value not in words:
        raise invalid_value(name, f"{quoted(value)} is not one of {', '.join(words)}")
    return value


def read_object(body: Body, name: str, *, path: str | None = None) -> dict[str, Any] | None:
    """An object.

    Raises:
        ApiError: 400.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid_type(path or name, "an object", value)
    return value


def read_list(body: Body, name: str, items_max: int, *, path: str | None = None) -> list[Any] | None:
    """An array of at most so many items, whatever they are.

    Raises:
        ApiError: 400.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, list):
        raise invalid_type(path or name, "an array", value)
    if len(value) > items_max:
        raise invalid_value(path or name, f"at most {items_max} items, got {len(value)}")
    return value
