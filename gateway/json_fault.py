"""What is wrong with JSON that could not be decoded, where msgspec's own words mislead."""

from __future__ import annotations

import re

import msgspec

_UP_TO_LONE_SURROGATE = re.compile(
    rb"(?:[^\\]|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def describe_fault(data: bytes, error: Exception) -> str:
    """A reason for people.

    Args:
        data: What was to be decoded.
        error: What decoding it raised.
    """
    escape = find_lone_surrogate(data)
    if escape is None:
        return str(error)
    place, written = escape
    return f"the escape {written} at byte {place} is half of a surrogate pair, which is no character"


def is_json_object(text: str) -> bool:
    """Whether a model has written a JSON object, and nothing else."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.MsgspecError, RecursionError):
        return False


def find_lone_surrogate(data: bytes) -> tuple[int, str] | None:
    r"""Where the first escape such as ``\ud800`` stands that has no other half, and how it is written."""
    passed = _UP_TO_LONE_SURROGATE.match(data)
    place = passed.end() if passed else 0
    escape = _SURROGATE_ESCAPE.match(data, place)
    return (place, escape.group().decode()) if escape else None
