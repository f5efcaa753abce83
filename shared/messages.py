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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from shared.errors import CACHE_MISS_REASONS, CacheMissReason, FrameError
from shared.fields import (
    BOOL,
    COUNT,
    COUNTERS,
    COUNTS,
    ID,
    LAYERS,
    NAME,
    NAMES,
    PROSE,
    ROUTE,
    SECONDS,
    TEXT,
    Struct,
    nested,
    number,
    one_of,
    optional,
    required,
)
from shared.layers import LayerRange
from shared.route import Route

TEMPERATURE_MAX = 100.0
"""Far beyond where sampling is still anything but uniform."""
KIND_CHARS_MAX = 64
"""How much of an unknown kind is repeated to its sender."""

CacheMode = Literal["prefill", "decode"]
NodeState = Literal["loading", "ready", "draining", "failed"]


class UnknownKind(FrameError):
    """A well-formed frame whose `kind` this version does not know."""

    def __init__(self, kind: str) -> None:
        self.kind = kind[:KIND_CHARS_MAX]
        super().__init__("unknown_kind", f"unknown message kind {self.kind!r}", kind=self.kind)


# --- structures that messages nest -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Struct):
    """How the last hop draws a token. With the token history and the position it decides the token.

    Args:
        temperature: 0 is greedy.
        top_p: Nucleus mass, 0 ≤ top_p ≤ 1; 0 leaves the likeliest token alone.
        seed: Always set by the gateway, also when the client gave none.
    """

    temperature: float = optional(number(0.0, TEMPERATURE_MAX), 1.0)
    top_p: float = optional(number(0.0, 1.0), 1.0)
    seed: int = optional(COUNT, 0)


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

    node: str = required(ID)
    pid: int = optional(COUNT, 0)
    model: str = required(NAME)
    model_name: str = optional(TEXT, "")
    layers: LayerRange = required(LAYERS)
    num_layers: int = required(COUNT)
    device: str = optional(NAME, "cpu")
    dtype: str = optional(NAME, "f32")
    state: NodeState = optional(one_of(("loading", "ready", "draining", "failed")), "loading")
    kv_cache: bool = optional(BOOL, True)
    token_ids: bool = optional(BOOL, True)
    sampling: tuple[str, ...] = optional(NAMES, ())
    kv_ttl_s: float = optional(SECONDS, 600.0)
    kv_sessions_max: int = optional(COUNT, 8)
    kv_bytes_max: int = optional(COUNT, 0)
    kv_bytes_per_token: int = optional(COUNT, 0)
    context_len: int = optional(COUNT, 0)

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

    state: NodeState = optional(one_of(("loading", "ready", "draining", "failed")), "ready")
    sessions: int = optional(COUNT, 0)
    kv_bytes: int = optional(COUNT, 0)
    queued_steps: int = optional(COUNT, 0)
    steps: dict[str, int] = required(COUNTERS)
    misses: dict[str, int] = required(COUNTERS)
    evictions: dict[str, int] = required(COUNTERS)
    errors: dict[str, int] = required(COUNTERS)
    busy_us: int = optional(COUNT, 0)


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
    versions: tuple[int, ...] = required(COUNTS)
    role: Literal["gateway", "node"] = required(one_of(("gateway", "node")))
    peer: str = required(ID)
    token: str | None = optional(TEXT, secret=True)
    model: str | None = optional(NAME)
    node: NodeInfo | None = optional(nested(NodeInfo))
    software: str = optional(NAME, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """The answer that opens the link: the version both speak, and the node's description if it is one."""

    kind: ClassVar[str] = "welcome"
    version: int = required(COUNT)
    peer: str = required(ID)
    node: NodeInfo | None = optional(nested(NodeInfo))
    software: str = optional(NAME, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    """The answer that ends the handshake: `unauthorized`, `version_mismatch`, `model_mismatch` and others."""

    kind: ClassVar[str] = "refused"
    code: str = required(ID)
    message: str = optional(PROSE, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress(Message):
    """A node that is still reading its weights: bytes done of bytes in all."""

    kind: ClassVar[str] = "load_progress"
    done_bytes: int = required(COUNT)
    total_bytes: int = required(COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Message):
    """The node's description has changed: it is ready, or loading has failed (`state` says which)."""

    kind: ClassVar[str] = "loaded"
    node: NodeInfo = required(nested(NodeInfo))
    error: str | None = optional(PROSE)


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
    session: str = required(ID)
    step_index: int = required(COUNT)
    epoch: int = optional(COUNT, 0)
    cache: CacheMode | None = optional(one_of(("prefill", "decode")))
    past_len: int = optional(COUNT, 0)
    new_len: int = optional(COUNT, 1)
    layers: LayerRange = required(LAYERS)
    model: str = required(NAME)
    output_len: int | None = optional(COUNT)
    sampling: SamplingParams | None = optional(nested(SamplingParams))
    route: Route | None = optional(ROUTE)


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
    session: str = required(ID)
    step_index: int = required(COUNT)
    epoch: int = optional(COUNT, 0)
    cached: bool = optional(BOOL, True)
    token_ids: tuple[int, ...] | None = optional(COUNTS)
    text: str | None = optional(TEXT)
    compute_us: int = optional(COUNT, 0)
    queue_us: int = optional(COUNT, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMiss(Message):
    """The node does not hold what a `decode` named; `held_len` is what it holds instead, if anything."""

    kind: ClassVar[str] = "cache_miss"
    session: str = required(ID)
    step_index: int = required(COUNT)
    epoch: int = optional(COUNT, 0)
    reason: CacheMissReason = required(one_of(CACHE_MISS_REASONS))
    held_len: int | None = optional(COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Error(Message):
    """A failure. With a session it answers a step, without one it concerns the link."""

    kind: ClassVar[str] = "error"
    code: str = required(ID)
    message: str = optional(PROSE, "")
    session: str | None = optional(ID)
    step_index: int | None = optional(COUNT)
    epoch: int = optional(COUNT, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Message):
    """The generation has ended: free the session."""

    kind: ClassVar[str] = "release"
    session: str = required(ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Message):
    """The caller has left: drop queued steps, stop the running one between layers, free the session."""

    kind: ClassVar[str] = "cancel"
    session: str = required(ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Message):
    """Asked with a sequence number, answered with the same number and, by a node, its statistics."""

    kind: ClassVar[str] = "heartbeat"
    seq: int = required(COUNT)
    reply: bool = optional(BOOL, False)
    stats: NodeStats | None = optional(nested(NodeStats))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Message):
    """The node finishes what it has and takes no new session."""

    kind: ClassVar[str] = "drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported(Message):
    """The answer to a message kind that is not known here."""

    kind: ClassVar[str] = "unsupported"
    unsupported: str = required(TEXT)


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
