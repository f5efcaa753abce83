"""Single fields of a JSON body, checked: absent and null are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.openai_errors import invalid_type, invalid_value, missing, quoted

MODEL_CHARS_MAX = 512


def read_model(body: Mapping[str, object]) -> str:
    """The model's name.

    Raises:
        ApiError: 400, also where there is none.
    """
    model = body.get("model")
    if model is None:
        raise missing("model")
    if not isinstance(model, str):
        raise invalid_type("model", "a string", model)
    if not model or len(model) > MODEL_CHARS_MAX:
        raise invalid_value("model", f"expected 1 to {MODEL_CHARS_MAX} characters")
    return model


def read_boolean(body: Mapping[str, object], name: str, *, default: bool = False) -> bool:
    """True or false.

    Raises:
        ApiError: 400 for anything else.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid_type(name, "a boolean", value)
    return value


def read_integer(body: Mapping[str, object], name: str, low: int, high: int) -> int | None:
    """An integer within bounds; None where there is none.

    Raises:
        ApiError: 400.
    """
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_type(name, "an integer", value)
    if not low <= value <= high:
        raise invalid_value(name, f"expected an integer from {low} to {high}, got {quoted(value)}")
    return value


def read_one_of(body: Mapping[str, object], name: str, choices: Sequence[str]) -> str:
    """One of a few words; the first where there is none.

    Raises:
        ApiError: 400 for any other.
    """
    value = body.get(name)
    if value is None:
        return choices[0]
    if not isinstance(value, str):
        raise invalid_type(name, "a string", value)
    if value not in choices:
        raise invalid_value(name, f"{quoted(value)} is not one of {', '.join(choices)}")
    return value
