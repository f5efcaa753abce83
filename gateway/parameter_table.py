"""What an endpoint does with each parameter of its body.

A parameter is honoured, accepted because ignoring it changes nothing in the answer, or refused with a 400
that names it. A refused parameter still passes when its value is the neutral one: null, or what means
"leave it as it is" (``echo: false``, ``mirostat: 0``), because many clients always send those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.openai_errors import invalid_type, invalid_value, unsupported

METADATA_PAIRS_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512


@dataclass(frozen=True, slots=True)
class Harmless:
    """Accepted and ignored: it changes nothing that the answer shows.

    Args:
        expected: The JSON types it may have, as `invalid_type` names them.
        types: The same as Python types.
        note: Why ignoring it is right.
    """

    expected: str
    types: tuple[type, ...]
    note: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Refused unless neutral.

    Args:
        reason: Completes "… is not supported by this server:".
        neutral: Values that ask for nothing, beside null.
    """

    reason: str
    neutral: tuple[object, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """Every parameter of one endpoint that this server knows.

    Args:
        honoured: Name and meaning.
        harmless: Accepted and ignored.
        refused: Refused unless neutral.
    """

    honoured: Mapping[str, str]
    harmless: Mapping[str, Harmless]
    refused: Mapping[str, Refused]

    def check(self, body: Mapping[str, object]) -> tuple[str, ...]:
        """Check what is not honoured, and return the names that are not known at all.

        Unknown names are accepted, as other servers do: they are some client's own and ask nothing of ours.

        Raises:
            ApiError: 400 for a refused parameter that is not neutral, or a harmless one of the wrong type.
        """
        unknown = []
        for name, value in body.items():
            if name in self.honoured:
                continue
            if name in self.refused:
                refuse_unless_neutral(name, value, self.refused[name])
            elif name in self.harmless:
                _check_harmless(name, value, self.harmless[name])
            else:
                unknown.append(name)
        return tuple(unknown)


def refuse_unless_neutral(name: str, value: object, refused: Refused) -> None:
    """Let null and neutral values pass.

    Raises:
        ApiError: 400 that names the parameter.
    """
    if value is not None and not any(_same(value, neutral) for neutral in refused.neutral):
        raise unsupported(name, refused.reason)


def _same(value: object, neutral: object) -> bool:
    """Equality that does not take ``false`` for 0, as Python's does; 0.0 is 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _check_harmless(name: str, value: object, harmless: Harmless) -> None:
    if value is not None and type(value) not in harmless.types:
        raise invalid_type(name, harmless.expected, value)
    if name == "metadata" and isinstance(value, dict):
        _check_metadata(value)


def _check_metadata(metadata: Mapping[str, object]) -> None:
    if len(metadata) > METADATA_PAIRS_MAX:
        raise invalid_value("metadata", f"at most {METADATA_PAIRS_MAX} pairs")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise invalid_type(f"metadata.{key[:METADATA_KEY_CHARS_MAX]}", "a string", value)
        if len(key) > METADATA_KEY_CHARS_MAX or len(value) > METADATA_VALUE_CHARS_MAX:
            limits = f"keys of at most {METADATA_KEY_CHARS_MAX} characters, values of {METADATA_VALUE_CHARS_MAX}"
            raise invalid_value("metadata", limits)
