"""The typed content of frames: what peers say to each other, and how each field is checked.

A message is a frozen dataclass. `to_header` writes its fields into a frame's header and leaves out
those that hold their default, which keeps a decode step's header small; `from_header` checks each
field's type and bounds. Unknown fields are ignored, so a newer peer may add some; an unknown kind
is an `UnknownKind`, which a link answers with `Unsupported` and survives.

Tensors travel beside the header (see `shared.frame`): a `Step` carries `token_ids` (``i32 [1, new_len]``)
to the first hop and to models that need ids on every hop, and `hidden_states` (whatever the layer
before the cut returned, usually ``[1, new_len, hidden_size]``) to all other hops. A `StepResult` of a
hop that is not last carries `hidden_states` of the step's last `output_len` positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from shared.errors import CACHE_MISS_REASONS, CacheMissReason, FrameError
from shared.layers import LayerRange
from shared.route import Hop, Route

COUNT_MAX = 2**53 - 1
"""The largest integer that every JSON implementation keeps exactly."""
NAME_CHARS_MAX = 64
"""Ids, fingerprints and codes: a UUID with a prefix, and room."""
TEXT_CHARS_MAX = 4096
"""Sentences for people, tokens, and a token's text."""
LIST_ITEMS_MAX = 4096
"""Hops of a route, ids of a result."""
COUNTERS_MAX = 256
"""Names in one table of counters: reasons and codes, of which there are a few dozen."""
SECONDS_MAX = 10.0 * 365 * 86_400
TEMPERATURE_MAX = 100.0
KIND_CHARS_MAX = 64
"""How much of an unknown kind is repeated to its sender."""

CacheMode = Literal["prefill", "decode"]
NodeState = Literal["loading", "ready", "draining", "failed"]


class UnknownKind(FrameError):
    """A well-formed frame whose `kind` this version does not know."""

    def __init__(self, kind: str) -> None:
        self.kind = kind[:KIND_CHARS_MAX]
        super().__init__("unknown_kind", f"unknown message kind {self.kind!r}", kind=self.kind)


# --- field codecs: how one field is written to and read from JSON -------------------------------


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


def _number(low: float, high: float) -> Codec:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"must be a number from {low} to {high}")
        return float(value)

    return Codec(read)


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


def _read_counters(value: object) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > COUNTERS_MAX:
        raise ValueError(f"must be an object of at most {COUNTERS_MAX} counts")
    return {_read_name(key): _read_count(count) for key, count in value.items()}


def _one_of(choices: tuple[str, ...]) -> Codec:
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
NAME = Codec(_read_name)
ID = Codec(_read_id)
COUNT = Codec(_read_count)
BOOL = Codec(_read_bool)
COUNTS = _list_of(_read_count)
NAMES = _list_of(_read_name)
COUNTERS = Codec(_read_counters)
SECONDS = _number(0.0, SECONDS_MAX)
LAYERS = Codec(_read_layers, lambda layers: [layers.start, layers.end])
ROUTE = Codec(_read_route, lambda route: [[hop.node, hop.layers.start, hop.layers.end] for hop in route.hops])


def _required(codec: Codec) -> Any:
    return field(metadata={"codec": codec})


def _optional(codec: Codec, default: Any = None, *, secret: bool = False) -> Any:
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


def _nested(cls: type[Struct]) -> Codec:
    def read(value: object) -> Struct:
        if not isinstance(value, dict):
            raise ValueError("must be an object")
        return cls.from_header(value)

    return Codec(read, lambda struct: struct.to_header())


# --- structures that messages nest -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Struct):
    """How the last hop draws a token. With the token history and the position it decides the token.

    Args:
        temperature: 0 is greedy.
        top_p: Nucleus mass, 0 ≤ top_p ≤ 1; 0 leaves the likeliest token alone.
        seed: Always set by the gateway, also when the client gave none.
    """

    temperature: float = _optional(_number(0.0, TEMPERATURE_MAX), 1.0)
    top_p: float = _optional(_number(0.0, 1.0), 1.0)
    seed: int = _optional(COUNT, 0)


SAMPLING_FIELDS: tuple[str, ...] = ("temperature", "top_p", "seed")
"""What this version's sampler honours; a node announces it, so that a gateway never asks for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo(Struct):
    """What a node says about itself at the handshake.

    Args:
        node: Its id, unique in the mesh.
        pid: Its process id, for people who look at one machine.
        model: Fingerprint of the model it serves (`shared.models.fingerprint`).
        model_name: The name people gave the model.
        layers: The range it holds.
        num_layers: How many decoder layers the whole model has.
        device: For example ``cpu`` or ``cuda:0``.
        dtype: Element type of its weights and outputs, a key of `ITEM_BYTES`.
        state: `ready` when it can serve steps.
        kv_cache: False when caching is off or the model's layers reject a cache.
        token_ids: Whether it can return token ids (true of a last hop with head and sampler).
        sampling: The sampling parameters it honours.
        kv_ttl_s: Seconds after which an untouched session expires.
        kv_sessions_max: How many sessions it holds at once.
        kv_bytes_max: Byte budget of all its sessions.
        kv_bytes_per_token: What one position of one session takes, for admission.
        context_len: Positions the model was trained for; 0 when unknown.
    """

    node: str = _required(ID)
    pid: int = _optional(COUNT, 0)
    model: str = _required(NAME)
    model_name: str = _optional(TEXT, "")
    layers: LayerRange = _required(LAYERS)
    num_layers: int = _required(COUNT)
    device: str = _optional(NAME, "cpu")
    dtype: str = _optional(NAME, "f32")
    state: NodeState = _optional(_one_of(("loading", "ready", "draining", "failed")), "loading")
    kv_cache: bool = _optional(BOOL, True)
    token_ids: bool = _optional(BOOL, True)
    sampling: tuple[str, ...] = _optional(NAMES, ())
    kv_ttl_s: float = _optional(SECONDS, 600.0)
    kv_sessions_max: int = _optional(COUNT, 8)
    kv_bytes_max: int = _optional(COUNT, 0)
    kv_bytes_per_token: int = _optional(COUNT, 0)
    context_len: int = _optional(COUNT, 0)

    @property
    def is_first(self) -> bool:
        """Whether it embeds token ids."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it applies norm, head and sampler."""
        return self.layers.end == self.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStats(Struct):
    """What a node reports with each heartbeat. Counters rise from its start.

    Args:
        state: As in `NodeInfo`.
        sessions: Sessions held.
        kv_bytes: Bytes of their K/V and other state.
        queued_steps: Steps waiting for the compute thread.
        steps: Steps served by mode: `prefill`, `decode`, `stateless`.
        misses: Cache misses answered, by reason.
        evictions: Sessions dropped, by cause: `expired`, `evicted`, `released`, `cancelled`.
        errors: Steps that failed, by code.
        busy_us: Microseconds the compute thread spent in steps.
    """

    state: NodeState = _optional(_one_of(("loading", "ready", "draining", "failed")), "ready")
    sessions: int = _optional(COUNT, 0)
    kv_bytes: int = _optional(COUNT, 0)
    queued_steps: int = _optional(COUNT, 0)
    steps: dict[str, int] = _required(COUNTERS)
    misses: dict[str, int] = _required(COUNTERS)
    evictions: dict[str, int] = _required(COUNTERS)
    errors: dict[str, int] = _required(COUNTERS)
    busy_us: int = _optional(COUNT, 0)


# --- messages ----------------------------------------------------------------------------------


class Message(Struct):
    """Base of everything that is the content of a frame."""

    __slots__ = ()
    kind: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """First message of the side that dialled.

    Args:
        versions: Protocol major versions it speaks.
        role: What it is.
        peer: Its id.
        token: The mesh token, absent when the mesh has none.
        model: The fingerprint it expects the other side to serve; absent accepts any.
        node: What it offers, when it is a node.
        software: Name and version, for logs.
    """

    kind: ClassVar[str] = "hello"
    versions: tuple[int, ...] = _required(COUNTS)
    role: Literal["gateway", "node"] = _required(_one_of(("gateway", "node")))
    peer: str = _required(ID)
    token: str | None = _optional(TEXT, secret=True)
    model: str | None = _optional(NAME)
    node: NodeInfo | None = _optional(_nested(NodeInfo))
    software: str = _optional(NAME, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """The answer that opens the link: the version both speak, and the node's description if it is one."""

    kind: ClassVar[str] = "welcome"
    version: int = _required(COUNT)
    peer: str = _required(ID)
    node: NodeInfo | None = _optional(_nested(NodeInfo))
    software: str = _optional(NAME, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    """The answer that ends the handshake: `unauthorized`, `version_mismatch`, `model_mismatch` and others."""

    kind: ClassVar[str] = "refused"
    code: str = _required(ID)
    message: str = _optional(PROSE, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress(Message):
    """A node that is still reading its weights: bytes done of bytes in all."""

    kind: ClassVar[str] = "load_progress"
    done_bytes: int = _required(COUNT)
    total_bytes: int = _required(COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Message):
    """The node's description has changed: it is ready, or loading has failed (`state` says which)."""

    kind: ClassVar[str] = "loaded"
    node: NodeInfo = _required(_nested(NodeInfo))
    error: str | None = _optional(PROSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Message):
    """One pass of one session over one hop.

    Args:
        session: Unique across gateways.
        step_index: Number of this pass, unique within the session.
        epoch: Rises with every replay or re-route; a node refuses an epoch below the one it holds.
        cache: `prefill` creates or replaces the session, `decode` continues it, absent is stateless.
        past_len: Positions the node must hold before this step; 0 unless `decode`.
        new_len: Positions that enter now.
        layers: The range the sender believes the node holds.
        model: The model's fingerprint.
        output_len: Return this many of the last positions' outputs; absent returns all `new_len`.
            A last hop samples one token after the last position whenever this is not 0.
        sampling: For the last hop. On `decode`, absent keeps what the session holds.
        route: The whole route, named where it is new (`prefill`, stateless); `epoch` stands for it later.
    """

    kind: ClassVar[str] = "step"
    session: str = _required(ID)
    step_index: int = _required(COUNT)
    epoch: int = _optional(COUNT, 0)
    cache: CacheMode | None = _optional(_one_of(("prefill", "decode")))
    past_len: int = _optional(COUNT, 0)
    new_len: int = _optional(COUNT, 1)
    layers: LayerRange = _required(LAYERS)
    model: str = _required(NAME)
    output_len: int | None = _optional(COUNT)
    sampling: SamplingParams | None = _optional(_nested(SamplingParams))
    route: Route | None = _optional(ROUTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult(Message):
    """A step's answer. A last hop gives `token_ids`; an old one that cannot gives `text`.

    Args:
        cached: False when the step was served without keeping a session.
        token_ids: Sampled ids, one in this version.
        text: The token's text, special tokens included, from a tail that cannot return ids.
        compute_us: Microseconds of the node's own compute.
        queue_us: Microseconds the step waited at the node.
    """

    kind: ClassVar[str] = "step_result"
    session: str = _required(ID)
    step_index: int = _required(COUNT)
    epoch: int = _optional(COUNT, 0)
    cached: bool = _optional(BOOL, True)
    token_ids: tuple[int, ...] | None = _optional(COUNTS)
    text: str | None = _optional(TEXT)
    compute_us: int = _optional(COUNT, 0)
    queue_us: int = _optional(COUNT, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMiss(Message):
    """The node does not hold what a `decode` named; `held_len` is what it holds instead, if anything."""

    kind: ClassVar[str] = "cache_miss"
    session: str = _required(ID)
    step_index: int = _required(COUNT)
    epoch: int = _optional(COUNT, 0)
    reason: CacheMissReason = _required(_one_of(CACHE_MISS_REASONS))
    held_len: int | None = _optional(COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Error(Message):
    """A failure. With a session it answers a step, without one it concerns the link."""

    kind: ClassVar[str] = "error"
    code: str = _required(ID)
    message: str = _optional(PROSE, "")
    session: str | None = _optional(ID)
    step_index: int | None = _optional(COUNT)
    epoch: int = _optional(COUNT, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Message):
    """The generation has ended: free the session."""

    kind: ClassVar[str] = "release"
    session: str = _required(ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Message):
    """The caller has left: drop queued steps, stop the running one between layers, free the session."""

    kind: ClassVar[str] = "cancel"
    session: str = _required(ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Message):
    """Asked with a sequence number, answered with the same number and, by a node, its statistics."""

    kind: ClassVar[str] = "heartbeat"
    seq: int = _required(COUNT)
    reply: bool = _optional(BOOL, False)
    stats: NodeStats | None = _optional(_nested(NodeStats))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Message):
    """The node finishes what it has and takes no new session."""

    kind: ClassVar[str] = "drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported(Message):
    """The answer to a message kind that is not known here."""

    kind: ClassVar[str] = "unsupported"
    unsupported: str = _required(TEXT)


MESSAGE_TYPES: dict[str, type[Message]] = {
    cls.kind: cls
    for cls in (
        Hello,
        Welcome,
        Refused,
        LoadProgress,
        Loaded,
        Step,
        StepResult,
        CacheMiss,
        Error,
        Release,
        Cancel,
        Heartbeat,
        Drain,
        Unsupported,
    )
}


def encode_header(message: Message) -> dict[str, object]:
    """The JSON header of a message, `kind` first."""
    return {"kind": message.kind, **message.to_header()}


def decode_header(header: Mapping[str, object]) -> Message:
    """Read a frame's header as the message that its `kind` names.

    Raises:
        FrameError: `bad_message` for a missing or wrong field.
        UnknownKind: For a kind that is not in `MESSAGE_TYPES`.
    """
    kind = header.get("kind")
    if not isinstance(kind, str):
        raise FrameError("bad_message", "the header has no kind")
    message_type = MESSAGE_TYPES.get(kind)
    if message_type is None:
        raise UnknownKind(kind)
    return message_type.from_header(header)
