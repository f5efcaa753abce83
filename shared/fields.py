"""How the fields of messages become JSON and back, each with its bounds.

A structure is a frozen dataclass whose fields are declared with `required` or `optional` and a `Codec`.
The codec is asked in both directions: what a peer sent is checked where it is read, and what we are about
to send is checked where it is written, so a fault of our own never shows as a link that the peer closes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from shared.errors import FrameError
from shared.layers import LayerRange
from shared.route import Hop, Route

COUNT_MAX = 2**53 - 1
"""The largest integer that every JSON implementation keeps exactly."""
NAME_CHARS_MAX = 64
"""Ids, fingerprints and codes: a UUID with a prefix, and room."""
TEXT_CHARS_MAX = 4096
"""Sentences for people, tokens, and a token's text."""
GRAMMAR_CHARS_MAX = 96 * 1024
"""A grammar as text. With everything else in a header it stays below the header's limit, in ASCII."""
GRAMMAR_START_FUEL = 100_000
"""What llguidance may spend on a grammar's first tokens, in its own unit: its default lets one expression such as
``a{1000000}`` compute for a quarter of a minute. Gateway and nodes use the same, so they refuse the same."""
GRAMMAR_STEP_FUEL = 50_000
"""And on each further token."""
BIAS_MAX = 1e4
"""Far more than any two logits of a model differ."""
LIST_ITEMS_MAX = 4096
"""Hops of a route, ids of a result."""
COUNTERS_MAX = 256
"""Names in one table of counters: reasons and codes, of which there are a few dozen."""
SECONDS_MAX = 10.0 * 365 * 86_400
"""Ten years: any duration that somebody means."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How one field becomes JSON and back.

    Args:
        decode: Reads a JSON value, or raises `ValueError` saying what it must be.
        encode: Makes the JSON value; None where the field's value is one already.
    """

    decode: Callable[[object], Any]
    encode: Callable[[Any], object] | None = None


def _text(chars_max: int, chars_min: int = 0) -> Callable[[object], str]:
    def read(value: object) -> str:
        if not isinstance(value, str) or not chars_min <= len(value) <= chars_max:
            raise ValueError(f"must be a string of {chars_min} to {chars_max} characters")
        return value

    return read


_read_name = _text(NAME_CHARS_MAX)
_read_id = _text(NAME_CHARS_MAX, 1)


def _read_count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise ValueError("must be an integer from 0 to 2^53 - 1")
    return value


def count(most: int) -> Codec:
    """An integer from 0 to a bound."""

    def read(value: object) -> int:
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"must be an integer from 0 to {most}")
        return value

    return Codec(read)


def number(low: float, high: float) -> Codec:
    """A finite number within bounds, both allowed; an integer reads as a float."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"must be a number from {low} to {high}")
        return float(value)

    return Codec(read)


_read_bias = number(-BIAS_MAX, BIAS_MAX).decode


def _read_bool(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def _read_layers(value: object) -> LayerRange:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be [start, end]")
    return LayerRange(_read_count(value[0]), _read_count(value[1]))


def _read_route(value: object) -> Route:
    hops = []
    for item in _read_list(value):
        if not isinstance(item, list) or len(item) != 3:
            raise ValueError("must be a list of [node, start, end]")
        hops.append(Hop(_read_id(item[0]), _read_layers(item[1:])))
    return Route(tuple(hops))


def _read_list(value: object) -> list[object]:
    if not isinstance(value, list) or len(value) > LIST_ITEMS_MAX:
        raise ValueError(f"must be a list of at most {LIST_ITEMS_MAX} items")
    return value


def _read_biases(value: object) -> tuple[tuple[int, float], ...]:
    biases = []
    for item in _read_list(value):
        if not isinstance(item, list) or len(item) != 2:
            raise ValueError("must be a list of [id, bias]")
        biases.append((_read_count(item[0]), _read_bias(item[1])))
    return tuple(biases)


def _read_counters(value: object) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > COUNTERS_MAX:
        raise ValueError(f"must be an object of at most {COUNTERS_MAX} counts")
    return {_read_name(key): _read_count(count) for key, count in value.items()}


def one_of(choices: tuple[str, ...]) -> Codec:
    """One of a few words."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value

    return Codec(read)


def _list_of(item: Callable[[object], Any]) -> Codec:
    return Codec(lambda value: tuple(item(part) for part in _read_list(value)), list)


def _clip(text: str) -> str:
    return text[:TEXT_CHARS_MAX].encode(errors="replace").decode()


TEXT = Codec(_text(TEXT_CHARS_MAX))
PROSE = Codec(_text(TEXT_CHARS_MAX), _clip)
"""Sentences for people, often another library's: clipped where they are written, so that none ends a link."""
GRAMMAR = Codec(_text(GRAMMAR_CHARS_MAX))
BIASES = Codec(_read_biases, lambda biases: [list(pair) for pair in biases])
NAME = Codec(_read_name)
ID = Codec(_read_id)
COUNT = Codec(_read_count)
BOOL = Codec(_read_bool)
COUNTS = _list_of(_read_count)
NAMES = _list_of(_read_name)
COUNTERS = Codec(_read_counters)
SECONDS = number(0.0, SECONDS_MAX)
LAYERS = Codec(_read_layers, lambda layers: [layers.start, layers.end])
ROUTE = Codec(_read_route, lambda route: [[hop.node, hop.layers.start, hop.layers.end] for hop in route.hops])


def required(codec: Codec) -> Any:
    """A field that is always on the wire."""
    return field(metadata={"codec": codec})


def optional(codec: Codec, default: Any = None, *, secret: bool = False) -> Any:
    """A field that is left out while it holds its default; a `secret` one is not shown by `repr`."""
    return field(default=default, metadata={"codec": codec}, repr=not secret)


class Struct:
    """A dataclass whose fields carry codecs; the base of messages and of what they nest."""

    __slots__ = ()

    def to_header(self) -> dict[str, object]:
        """The fields that differ from their default, as JSON values.

        Raises:
            ValueError: A field holds what no receiver would accept, so the fault shows where it was made.
        """
        header: dict[str, object] = {}
        for name, codec, default in _fields_of(type(self)):
            value = getattr(self, name)
            if value is default or value == default:
                continue
            encoded = value if codec.encode is None else codec.encode(value)
            try:
                codec.decode(encoded)
            except (ValueError, FrameError) as error:
                raise ValueError(f"{type(self).__name__}.{name}: {error}") from error
            header[name] = encoded
        return header

    @classmethod
    def from_header(cls, header: Mapping[str, object]) -> Self:
        """Check and read the fields.

        Raises:
            FrameError: `bad_message`, naming the field and what it must be.
        """
        values: dict[str, Any] = {}
        for name, codec, default in _fields_of(cls):
            if name in header:
                try:
                    values[name] = codec.decode(header[name])
                except ValueError as error:
                    raise FrameError("bad_message", f"{cls.__name__}.{name}: {error}", field=name) from error
            elif default is dataclasses.MISSING:
                raise FrameError("bad_message", f"{cls.__name__}.{name} is missing", field=name)
        return cls(**values)


_FIELDS: dict[type, list[tuple[str, Codec, Any]]] = {}


def _fields_of(cls: type) -> list[tuple[str, Codec, Any]]:
    if cls not in _FIELDS:
        _FIELDS[cls] = [(f.name, f.metadata["codec"], f.default) for f in dataclasses.fields(cls)]
    return _FIELDS[cls]


def nested(cls: type[Struct]) -> Codec:
    """Another structure, as a JSON object."""

    def read(value: object) -> Struct:
        if not isinstance(value, dict):
            raise ValueError("must be an object")
        return cls.from_header(value)

    return Codec(read, lambda struct: struct.to_header())
