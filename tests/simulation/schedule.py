"""What happens in one simulation: plain data, drawn from a seed, so that it can be printed, replayed and cut down.

A `Schedule` is everything that a run depends on. Fates meet a node's steps by their number; events happen at a
moment. To add a kind of event: a line in `EVENTS` here, and the method of that name in `tests.simulation.world.World`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from shared.messages import FEATURES, Pooling, SamplingParams
from tests.simulation.garbage import impossible_token, no_tensors, one_position_more
from tests.support.memory_mesh import NUM_LAYERS
from tests.support.scripted_node import (
    VOCAB_SIZE,
    Again,
    Crash,
    Cut,
    Drop,
    Fail,
    Fate,
    Late,
    Mangle,
    Miss,
    Noise,
    Slow,
    Stray,
    Twice,
)

EVENTS: dict[str, tuple[float, float]] = {
    "stall": (0.1, 6.0),
    "kill": (0.0, 5.0),
    "leave": (0.0, 0.0),
    "cut": (0.0, 0.0),
    "deafen": (0.1, 5.0),
    "mute": (0.1, 5.0),
    "delay_there": (0.1, 5.0),
    "delay_back": (0.1, 5.0),
    "evict": (0.0, 0.0),
    "drain": (0.1, 4.0),
    "refuse": (0.1, 4.0),
    "other_work": (0.1, 8.0),
    "recut": (0.0, 0.0),
    "restart_gateway": (0.0, 0.0),
    "kill_gateway": (0.0, 0.0),
}
"""Every kind of event, and how long it may last, in seconds."""
RARE_EVENTS = ("restart_gateway", "kill_gateway", "leave", "recut")
"""At most one of each in a schedule, and not in most."""
EVENTS_MAX = 5
STEPS_WITH_FATES = 60
"""Steps of a node beyond this number are served as they come."""
REQUESTS_MAX = 3
TOPOLOGIES = (
    ("0:2", "2:4", "4:6", "0:2", "2:4", "4:6"),
    ("0:3", "3:6", "0:3", "3:6"),
    ("0:3", "3:6", "3:6"),
    ("0:2", "2:4", "4:6", "2:4"),
    ("0:1", "1:5", "5:6"),
    ("0:6", "0:6"),
    ("0:3", "3:6", "0:6"),
)
"""With replicas and without; the last one has two routes, of which the shorter is taken while it is there."""
PLANNED_TOPOLOGIES = (
    ("+3", "+3"),
    ("+2", "+2", "+3", "+6"),
    ("+4", "+4", "+4"),
    ("+6", "+6"),
    ("0:3", "+3", "+4"),
    ("0:2", "4:6", "+2", "+2"),
)
"""With machines that join by themselves and are given layers: ``+3`` has room for three."""
PLANNED_SHARE = 0.25
NOT_OF_JOINERS = {"recut": "cut", "deafen": "delay_there", "mute": "delay_back"}
"""What happens to one that has joined instead: its link loses nothing while it lasts, and its range is the plan's."""


@dataclass(frozen=True)
class Event:
    """Something that happens to a node, or to the gateway, at a moment."""

    at_s: float
    kind: str
    node: int
    seconds: float


@dataclass(frozen=True)
class StepFate:
    """What one node's step of this number meets."""

    node: int
    step: int
    fate: Fate


@dataclass(frozen=True)
class Call:
    """One request and how its caller behaves.

    Args:
        kind: What is asked for.
        at_s: When.
        prompt_ids: The prompt.
        max_tokens: Of each choice.
        choices: Sampling of each; empty for an embedding.
        prompt_logprobs: How the prompt is scored.
        priority: Lower ones first.
        pooling: Of an embedding.
        finish_after: Tokens of each choice after which the caller finishes it.
        leave_after: Tokens of all choices after which the caller leaves; None to stay.
        leave_at_s: When the caller leaves whatever it got; None to stay.
        pauses: Seconds between its reads, over and over.
    """

    kind: Literal["generate", "embed"]
    at_s: float
    prompt_ids: tuple[int, ...]
    max_tokens: int = 0
    choices: tuple[SamplingParams, ...] = ()
    prompt_logprobs: int | None = None
    priority: int = 0
    pooling: Pooling = "mean"
    finish_after: tuple[int, ...] = ()
    leave_after: int | None = None
    leave_at_s: float | None = None
    pauses: tuple[float, ...] = (0.0,)


@dataclass(frozen=True)
class Schedule:
    """Everything that happens.

    Args:
        seed: What it was drawn from.
        is_harsh: Limits are so short, or so much is lost, that requests may fail; else none may.
        cuts: The nodes' ranges, or how many layers they have room for (`PLANNED_TOPOLOGIES`).
        node_options: For each node, as `tests.simulation.node.SimulatedNode` takes them.
        joins_at_s: For each node, when it is there for the first time.
        settings: Of the gateway.
        calls: The requests.
        fates: What steps meet.
        events: What happens beside.
    """

    seed: int
    is_harsh: bool
    cuts: tuple[str, ...]
    node_options: tuple[dict[str, Any], ...]
    joins_at_s: tuple[float, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()
    fates: tuple[StepFate, ...] = ()
    events: tuple[Event, ...] = ()


def draw_schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = Random(seed)
    is_harsh = rng.random() < 0.15
    cuts = rng.choice(PLANNED_TOPOLOGIES if rng.random() < PLANNED_SHARE else TOPOLOGIES)
    rate = rng.choice([0.0, 0.05, 0.1, 0.15]) if not is_harsh else 0.2
    return Schedule(
        seed=seed,
        is_harsh=is_harsh,
        cuts=cuts,
        node_options=_node_options(rng, cuts),
        joins_at_s=tuple(rng.choice([0.0, 0.0, 0.0, rng.uniform(0, 4)]) for _ in cuts),
        settings=_settings(rng, is_harsh=is_harsh),
        calls=tuple(draw_call(rng) for _ in range(rng.randint(1, REQUESTS_MAX))),
        fates=tuple(fate for node in range(len(cuts)) for fate in _fates(rng, node, rate)),
        events=_events(rng, cuts, is_harsh=is_harsh),
    )


def _node_options(rng: Random, cuts: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    streams = rng.random() < 0.15
    return tuple(
        {
            "caches": rng.random() > 0.1,
            "kv_cache": rng.random() > 0.05,
            "features": rng.choice([FEATURES, FEATURES, ("score", "embed")]),
            "sessions_max": rng.choice([8, 8, 2, 1]),
            "bytes_max": rng.choice([0, 0, 0, 10_000, 5_000, 200]),
            "needs_token_ids": rng.random() < 0.1,
            "step_s": rng.choice([0.0, 0.0, 0.01, 0.2]),
            "streams": streams,
            "fork_fails": rng.choice([0.0, 0.0, 0.3]),
        }
        for _ in cuts
    )


def _settings(rng: Random, *, is_harsh: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "journal_bytes_max": rng.choice([1 << 30, 1 << 30, 0, 3_000, 6_000]),
        "prefill_chunk_tokens": rng.choice([2, 4, 4, 32]),
        "queue_max": 8,
        "queue_timeout_s": 600.0,
        "route_wait_s": 60.0,
        "failover_timeout_s": 300.0,
    }
    if is_harsh:
        settings |= {
            "queue_max": rng.choice([0, 1, 8]),
            "queue_timeout_s": rng.uniform(0.5, 5.0),
            "route_wait_s": rng.uniform(0.1, 3.0),
            "failover_timeout_s": rng.uniform(0.1, 3.0),
        }
    return settings


def draw_call(rng: Random) -> Call:
    """One request."""
    at_s = rng.uniform(0, 3)
    prompt_ids = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 14)))
    leave_at_s = rng.choice([None, None, None, None, at_s + rng.uniform(0, 5)])
    if rng.random() < 0.2:
        pooling: Pooling = rng.choice(["mean", "last"])
        return Call("embed", at_s, prompt_ids, pooling=pooling, leave_at_s=leave_at_s)
    seeds = [rng.randrange(100) for _ in range(rng.choice([1, 1, 1, 2, 3, 4]))]
    fields = {
        "temperature": rng.choice([0.0, 0.7]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.5]),
        "logprobs": rng.choice([None, None, 0, 2]),
    }
    prompt_logprobs = rng.choice([None, None, None, 0, 2])
    return Call(
        "generate",
        at_s,
        prompt_ids,
        max_tokens=rng.randint(1 if prompt_logprobs is None else 0, 12 if len(seeds) == 1 else 6),
        choices=tuple(SamplingParams(seed=seed, **fields) for seed in seeds),
        prompt_logprobs=prompt_logprobs,
        priority=rng.choice([0, 0, 1]),
        finish_after=tuple(rng.choice([99, 99, 99, rng.randint(1, 4)]) for _ in seeds),
        leave_after=rng.choice([None, None, None, rng.randint(1, 12)]),
        leave_at_s=leave_at_s,
        pauses=rng.choice([(0.0,), (0.0, 0.0, 0.3), (0.05,)]),
    )


def _fates(rng: Random, node: int, rate: float) -> Iterator[StepFate]:
    step = 0
    while rate:
        step += 1 + int(rng.expovariate(rate))
        if step > STEPS_WITH_FATES:
            return
        yield StepFate(node, step - 1, random_fate(rng))


def random_fate(rng: Random) -> Fate:
    """One of all that can become of a step."""
    return rng.choice(FATES)(rng)


FATES: tuple[Callable[[Random], Fate], ...] = (
    lambda rng: Miss(rng.choice(["unknown", "expired", "evicted", "past_len_mismatch"])),
    lambda _rng: Miss("evicted"),
    lambda _rng: Miss("disabled"),
    lambda rng: Fail(rng.choice(["internal_error", "out_of_memory", "kv_budget_exceeded", "non_finite_logits"])),
    lambda rng: Fail(rng.choice(["queue_full", "session_busy", "not_ready", "stale_epoch", "cancelled"])),
    lambda rng: Slow(rng.uniform(0.1, 8.0)),
    lambda rng: Late(rng.uniform(0.1, 8.0)),
    lambda rng: Twice(rng.uniform(0.0, 4.0)),
    lambda _rng: Again(),
    lambda _rng: Stray(),
    lambda _rng: Noise(),
    lambda rng: Drop(applied=rng.random() < 0.5),
    lambda rng: Cut(applied=rng.random() < 0.5),
    lambda rng: Crash(back_after_s=rng.uniform(0.0, 5.0)),
    lambda rng: Mangle(rng.choice([no_tensors, one_position_more, impossible_token])),
)
"""Each draws one of a kind."""


def _events(rng: Random, cuts: tuple[str, ...], *, is_harsh: bool) -> tuple[Event, ...]:
    kinds = [kind for kind in EVENTS if kind not in RARE_EVENTS]
    chosen = [rng.choice(kinds) for _ in range(rng.randint(0, EVENTS_MAX))]
    chosen += [kind for kind in RARE_EVENTS if rng.random() < 0.12]
    spare = [node for node, cut in enumerate(cuts) if is_harsh or _can_spare(cuts, node)]
    events = []
    for kind in chosen:
        node = rng.randrange(len(cuts))
        if kind == "leave":
            if not spare:
                continue
            node = rng.choice(spare)
        happens = NOT_OF_JOINERS.get(kind, kind) if is_joiner(cuts[node]) else kind
        events.append(Event(rng.uniform(0.0, 6.0), happens, node, rng.uniform(*EVENTS[kind])))
    return tuple(sorted(events, key=lambda event: event.at_s))


def is_joiner(cut: str) -> bool:
    """Whether a node of a topology joins by itself."""
    return cut.startswith("+")


def room_of(cut: str) -> int:
    """How many layers a machine has room for."""
    return int(cut.removeprefix("+"))


def _can_spare(cuts: tuple[str, ...], node: int) -> bool:
    """Whether others have a node's layers, or room for all."""
    if is_joiner(cuts[node]):
        return sum(room_of(cut) for cut in (*cuts[:node], *cuts[node + 1 :]) if is_joiner(cut)) >= NUM_LAYERS
    return cuts[node] in cuts[:node]
