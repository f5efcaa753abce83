"""The typed content of frames: what peers say to each other, and how each field is checked.

A message is a frozen dataclass. `to_header` writes its fields into a frame's header and leaves out
those that hold their default, which keeps a decode step's header small; `from_header` checks each
field's type and bounds. Unknown fields are ignored, so a newer peer may add some; an unknown kind
is an `UnknownKind`, which a link answers with `Unsupported` and survives.

Tensors travel beside the header (see `shared.frame`): a `Step` carries `token_ids` (``i32 [1, new_len]``)
to the first hop and to models that need ids on every hop, and `hidden_states` (whatever the layer
before the cut returned, usually ``[1, new_len, hidden_size]``) to all other hops. A `StepResult` of a
hop that is not last carries `hidden_states` of the step's last `output_len` positions.

Of the last hop alone: its steps also carry `token_ids` when `SamplingParams.needs_history`, and with `score`
`target_ids` (``i32 [1, new_len]``: the token after each position, -1 where it is not to be scored). Its result then
carries `logprobs` (``f32 [rows, 1 + n]``) and `logprob_ids` (``i32 [rows, 1 + n]``): a row for each scored target in
order, with n = `score`, or one for the drawn token, with n = `SamplingParams.logprobs`; the first column is the token
itself, the others are the likeliest, best first. With `pool` it carries `embedding` (``f32 [hidden_size]``): the sum
over the step's positions of the final norm's output (`mean`), or that of the last position (`last`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from shared.errors import CACHE_MISS_REASONS, CacheMissReason, FrameError
from shared.fields import (
    BIASES,
    BOOL,
    COUNT,
    COUNTERS,
    COUNTS,
    GRAMMAR,
    ID,
    LAYERS,
    NAME,
    NAMES,
    PROSE,
    ROUTE,
    SECONDS,
    TEXT,
    Struct,
    count,
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
PENALTY_MAX = 100.0
"""Beyond it a penalty only moves the tokens it meets further out of reach."""
LOGPROBS_MAX = 32
"""Alternatives that a result carries for one token; more would make a long scored prompt's frame too large."""
PROBE_BYTES_MAX = 4 * 1024 * 1024
"""What a probe carries at most; a gigabyte per second is told from no time at all with it."""
KIND_CHARS_MAX = 64
"""How much of an unknown kind is repeated to its sender."""

CacheMode = Literal["prefill", "decode"]
Pooling = Literal["mean", "last"]
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

    They apply in the order of the fields from `grammar` on: what rules tokens out, then what shifts logits, then
    temperature, then what cuts the tail. `docs/protocol.md` gives the arithmetic.

    Args:
        temperature: 0 is greedy.
        top_p: Nucleus mass, 0 ≤ top_p ≤ 1; 0 leaves the likeliest token alone.
        seed: Always set by the gateway, also when the client gave none.
        prompt_len: Positions of the history that are the prompt; what follows is the answer.
        grammar: What the answer must match, as llguidance's own grammar text; empty allows anything.
        allowed_ids: Only these tokens may be drawn; empty allows all.
        banned_ids: These may not.
        end_ids: Tokens that end an answer. They may not be drawn before `min_tokens`, and a grammar that is
            satisfied allows them.
        min_tokens: Tokens of the answer before one of `end_ids` may come.
        logit_bias: ``(id, bias)``: added to that token's logit.
        repetition_penalty: Logits of tokens in the history, prompt included, are divided by it where positive and
            multiplied where negative; 1 changes nothing.
        frequency_penalty: Subtracted from a token's logit for each time that the answer has it.
        presence_penalty: Subtracted from a token's logit once if the answer has it.
        min_p: Tokens less likely than this share of the likeliest are ruled out, after temperature.
        top_k: The most tokens that may be drawn; 0 is all.
        logprobs: Return the drawn token's log-probability and so many of the likeliest; None returns none.
            They are those of the model's own logits, before everything above.
    """

    temperature: float = optional(number(0.0, TEMPERATURE_MAX), 1.0)
    top_p: float = optional(number(0.0, 1.0), 1.0)
    seed: int = optional(COUNT, 0)
    prompt_len: int = optional(COUNT, 0)
    grammar: str = optional(GRAMMAR, "")
    allowed_ids: tuple[int, ...] = optional(COUNTS, ())
    banned_ids: tuple[int, ...] = optional(COUNTS, ())
    end_ids: tuple[int, ...] = optional(COUNTS, ())
    min_tokens: int = optional(COUNT, 0)
    logit_bias: tuple[tuple[int, float], ...] = optional(BIASES, ())
    repetition_penalty: float = optional(number(0.0, PENALTY_MAX), 1.0)
    frequency_penalty: float = optional(number(-PENALTY_MAX, PENALTY_MAX), 0.0)
    presence_penalty: float = optional(number(-PENALTY_MAX, PENALTY_MAX), 0.0)
    min_p: float = optional(number(0.0, 1.0), 0.0)
    top_k: int = optional(COUNT, 0)
    logprobs: int | None = optional(count(LOGPROBS_MAX))

    @property
    def needs_history(self) -> bool:
        """Whether the draw depends on which tokens came before; then every step to the last hop names them."""
        return bool(
            self.grammar
            or self.min_tokens
            or self.repetition_penalty != 1
            or self.frequency_penalty
            or self.presence_penalty
        )

    def asked_fields(self) -> frozenset[str]:
        """Names of the fields that differ from their default: what a last hop must honour."""
        return frozenset(self.to_header())


SAMPLING_FIELDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(SamplingParams))
"""What this version's sampler honours; a node announces it, so that a gateway never asks for more."""
FEATURES: tuple[str, ...] = ("fork", "rewind", "score", "embed")
"""What a node can do beyond plain steps: copy a session, drop its last positions, score, give embeddings."""


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
        dtype: Element type of its outputs, a key of `ITEM_BYTES`, and of its weights unless they are quantized.
        quantize: ``none``, ``int8`` or ``int4``: how it holds the weights of linear layers.
        state: `ready` when it can serve steps.
        kv_cache: False when caching is off or the model's layers reject a cache.
        token_ids: Whether it can return token ids (true of a last hop with head and sampler).
        sampling: The sampling parameters it honours.
        features: What it can do beyond plain steps, of `FEATURES`.
        kv_ttl_s: Seconds after which an untouched session expires.
        kv_sessions_max: How many sessions it holds at once.
        kv_bytes_max: Byte budget of all its sessions.
        kv_bytes_per_token: What one position of one session takes, for admission.
        context_len: Positions the model was trained for; 0 when unknown.
        needs_token_ids: It is not first, and wants the steps' token ids beside their hidden states.
        refused_cuts: Layers of the model before which no range may begin, because a layer behind the cut uses what one
            before it gave.
    """

    node: str = required(ID)
    pid: int = optional(COUNT, 0)
    model: str = required(NAME)
    model_name: str = optional(TEXT, "")
    layers: LayerRange = required(LAYERS)
    num_layers: int = required(COUNT)
    device: str = optional(NAME, "cpu")
    dtype: str = optional(NAME, "f32")
    quantize: str = optional(NAME, "none")
    state: NodeState = optional(one_of(("loading", "ready", "draining", "failed")), "loading")
    kv_cache: bool = optional(BOOL, True)
    token_ids: bool = optional(BOOL, True)
    sampling: tuple[str, ...] = optional(NAMES, ())
    features: tuple[str, ...] = optional(NAMES, ())
    kv_ttl_s: float = optional(SECONDS, 600.0)
    kv_sessions_max: int = optional(COUNT, 8)
    kv_bytes_max: int = optional(COUNT, 0)
    kv_bytes_per_token: int = optional(COUNT, 0)
    context_len: int = optional(COUNT, 0)
    needs_token_ids: bool = optional(BOOL, False)
    refused_cuts: tuple[int, ...] = optional(COUNTS, ())

    @property
    def precision(self) -> str:
        """What decides how it rounds, for example ``bf16`` or ``bf16/int8``."""
        return self.dtype if self.quantize == "none" else f"{self.dtype}/{self.quantize}"

    @property
    def is_first(self) -> bool:
        """Whether it embeds token ids."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it applies norm, head and sampler."""
        return self.layers.end == self.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineInfo(Struct):
    """What a node that takes any range says of its machine, in bytes, bytes per second and microseconds.

    Args:
        device: For example ``cpu`` or ``cuda:0``.
        dtype: Element type in which it would compute, a key of `ITEM_BYTES`; absent takes what a model is stored in.
        memory_bytes: All that the node's process may use: weights, caches, and its own runtime.
        runtime_bytes: What the process needs of it besides weights and caches.
        read_bytes_per_s: How fast a decode step reads weights there; a layer's time is its active bytes divided by it.
        prefill_bytes_per_s: Weight bytes times positions per second of a long prefill step; 0 when not measured.
        models: Fingerprints of models whose weights lie on its disk, whole or in part.
        quantize: How it would hold the weights of linear layers, as in `NodeInfo`. Speeds count bytes as if they were
            plain all the same.
    """

    device: str = optional(NAME, "cpu")
    dtype: str | None = optional(NAME)
    memory_bytes: int = required(COUNT)
    runtime_bytes: int = optional(COUNT, 0)
    read_bytes_per_s: int = required(COUNT)
    prefill_bytes_per_s: int = optional(COUNT, 0)
    models: tuple[str, ...] = optional(NAMES, ())
    quantize: str = optional(NAME, "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStats(Struct):
    """What a node reports with each heartbeat. Counters rise from its start.

    Args:
        state: As in `NodeInfo`.
        sessions: Sessions held.
        kv_bytes: Bytes of their K/V and other state.
        queued_steps: Steps waiting for the compute thread.
        steps: Steps served by mode: `prefill`, `decode`, `stateless`; and copies made, as `fork`.
        misses: Cache misses answered, by reason.
        evictions: Sessions dropped, by cause: `expired`, `evicted`, `released`, `cancelled`.
        errors: Steps that failed, by code.
        busy_us: Microseconds the compute thread spent in steps.
        memory_bytes: What its process has of its device's memory; 0 when it does not say, like the next two.
        memory_limit_bytes: The device's memory, or what the process may have of it.
        weights_bytes: What its weights take of it.
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
    memory_bytes: int = optional(COUNT, 0)
    memory_limit_bytes: int = optional(COUNT, 0)
    weights_bytes: int = optional(COUNT, 0)


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
        node: What it serves, when it is a node that has a range.
        machine: What it offers, when it is a node that takes whatever range it is given by `Load`.
        software: Name and version, for logs.
    """

    kind: ClassVar[str] = "hello"
    versions: tuple[int, ...] = required(COUNTS)
    role: Literal["gateway", "node"] = required(one_of(("gateway", "node")))
    peer: str = required(ID)
    token: str | None = optional(TEXT, secret=True)
    model: str | None = optional(NAME)
    node: NodeInfo | None = optional(nested(NodeInfo))
    machine: MachineInfo | None = optional(nested(MachineInfo))
    software: str = optional(NAME, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """The answer that opens the link: the version both speak, and what a node says of itself, as in `Hello`."""

    kind: ClassVar[str] = "welcome"
    version: int = required(COUNT)
    peer: str = required(ID)
    node: NodeInfo | None = optional(nested(NodeInfo))
    machine: MachineInfo | None = optional(nested(MachineInfo))
    software: str = optional(NAME, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    """The answer that ends the handshake: `unauthorized`, `version_mismatch`, `model_mismatch` and others."""

    kind: ClassVar[str] = "refused"
    code: str = required(ID)
    message: str = optional(PROSE, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Message):
    """Hold this range from now on, instead of what was held before. For a node that has sent a `MachineInfo`.

    Answered with `LoadProgress` while it fetches and reads, and with `Loaded` in the end. One that it holds already is
    answered with `Loaded` at once. A later `Load` or an `Unload` ends the one under way.

    Args:
        layers: The range.
        model: The model's fingerprint; what was fetched must have it.
        model_name: What `--model` would name it by: a catalogue name or a hub id; may mean nothing to this machine.
        num_layers: Decoder layers of the whole model.
        files: Path on the dialled gateway below which the model's files can be read by byte range; absent when it has
            none.
    """

    kind: ClassVar[str] = "load"
    layers: LayerRange = required(LAYERS)
    model: str = required(NAME)
    model_name: str = optional(TEXT, "")
    num_layers: int = required(COUNT)
    files: str | None = optional(TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload(Message):
    """Give the range and its memory back; sessions on it are lost. Not answered."""

    kind: ClassVar[str] = "unload"


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
        past_len: Positions that come before this step, and that the node must hold; 0 unless `decode`.
        rewind_from: On `decode`: the node must hold so many positions, and drops those from `past_len` on before the
            step. Absent, it must hold exactly `past_len`, as a node that does not know this field demands anyway.
        new_len: Positions that enter now.
        layers: The range the sender believes the node holds.
        model: The model's fingerprint.
        output_len: Return this many of the last positions' outputs; absent returns all `new_len`.
            A last hop samples one token after the last position whenever this is not 0.
        sampling: For the last hop. On `decode`, absent keeps what the session holds.
        route: The whole route, named where it is new (`prefill`, stateless); `epoch` stands for it later.
        score: For the last hop: return the log-probability of each of the step's `target_ids`, and so many of
            the likeliest tokens at its place.
        pool: For the last hop: return the step's part of an embedding instead of drawing a token.
    """

    kind: ClassVar[str] = "step"
    session: str = required(ID)
    step_index: int = required(COUNT)
    epoch: int = optional(COUNT, 0)
    cache: CacheMode | None = optional(one_of(("prefill", "decode")))
    past_len: int = optional(COUNT, 0)
    rewind_from: int | None = optional(COUNT)
    new_len: int = optional(COUNT, 1)
    layers: LayerRange = required(LAYERS)
    model: str = required(NAME)
    output_len: int | None = optional(COUNT)
    sampling: SamplingParams | None = optional(nested(SamplingParams))
    route: Route | None = optional(ROUTE)
    score: int | None = optional(count(LOGPROBS_MAX))
    pool: Pooling | None = optional(one_of(("mean", "last")))


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
class Fork(Message):
    """Copy a session as it stands under a new id. Not answered.

    A node that cannot (it does not hold exactly this, or has no room) does nothing, and the first `decode` of the
    copy is then a `cache_miss` like any other.

    Args:
        session: The one to copy; it must hold exactly `past_len` positions of these layers of this model.
        target: The copy's id; a session that it named before is replaced.
        past_len: Positions of both.
        epoch: The copy's.
        layers: As in `Step`.
        model: As in `Step`.
        sampling: The copy's, for the last hop.
    """

    kind: ClassVar[str] = "fork"
    session: str = required(ID)
    target: str = required(ID)
    past_len: int = required(COUNT)
    epoch: int = optional(COUNT, 0)
    layers: LayerRange = required(LAYERS)
    model: str = required(NAME)
    sampling: SamplingParams | None = optional(nested(SamplingParams))


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
    """Asked with a sequence number, answered with the same number and, by a node, its statistics.

    Args:
        seq: Chosen by who asks.
        reply: It is the answer.
        stats: A node's, in its answer.
        sessions: From a gateway that asks: how many sessions it has at this node.
        waiting: With `sessions`: how many more it would begin if there were places.
        granted: In a node's answer to that: how many it may have there from now on.
    """

    kind: ClassVar[str] = "heartbeat"
    seq: int = required(COUNT)
    reply: bool = optional(BOOL, False)
    stats: NodeStats | None = optional(nested(NodeStats))
    sessions: int | None = optional(COUNT)
    waiting: int = optional(COUNT, 0)
    granted: int | None = optional(COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Message):
    """Bytes that come back, to tell how fast the link is. A node answers at once, with the same number and tensors.

    Args:
        seq: Chosen by who asks.
        reply: It is the answer.
    """

    kind: ClassVar[str] = "probe"
    seq: int = required(COUNT)
    reply: bool = optional(BOOL, False)


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
        Load,
        Unload,
        LoadProgress,
        Loaded,
        Step,
        StepResult,
        CacheMiss,
        Error,
        Fork,
        Release,
        Cancel,
        Heartbeat,
        Probe,
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
