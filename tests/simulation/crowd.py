"""Schedules in which sessions have to go where others are: many callers, few places, and most nodes lost for good."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.schedule import RARE_EVENTS, Event, Schedule, draw_call, draw_schedule

CALLS_MORE = 4
CUTS = (
    ("0:2", "2:4", "4:6") * 2,
    ("0:3", "3:6") * 2,
    ("0:3", "3:6") * 3,
    ("0:3", "3:6", "0:2", "2:4", "4:6"),
)
"""Copies of each range, or another route."""
LEAVES_WITHIN_S = 5.0


def draw_crowd(seed: int) -> Schedule:
    """The schedule of a seed: as the usual one, with more callers, less room, and just one node of each range left."""
    rng, usual = Random(seed), draw_schedule(seed)
    cuts = rng.choice(CUTS)
    room = usual.node_options[0] | {"kv_cache": True, "caches": True}
    return replace(
        usual,
        is_harsh=False,
        cuts=cuts,
        node_options=tuple(
            room | {"sessions_max": rng.choice([1, 1, 2]), "bytes_max": 0, "step_s": rng.choice([0.05, 0.2])}
            for _ in cuts
        ),
        joins_at_s=(0.0,) * len(cuts),
        settings=usual.settings
        | {"queue_max": 8, "queue_timeout_s": 600.0, "route_wait_s": 60.0, "failover_timeout_s": 300.0},
        calls=usual.calls + tuple(draw_call(rng) for _ in range(CALLS_MORE)),
        fates=tuple(fate for fate in usual.fates if fate.node < len(cuts)),
        events=_events(rng, usual, cuts),
    )


def _events(rng: Random, usual: Schedule, cuts: tuple[str, ...]) -> tuple[Event, ...]:
    kept = [event for event in usual.events if event.kind not in RARE_EVENTS and event.node < len(cuts)]
    kept += [Event(rng.uniform(0.3, LEAVES_WITHIN_S), "leave", node, 0.0) for node in _leaving(rng, cuts)]
    return tuple(sorted(kept, key=lambda event: event.at_s))


def _leaving(rng: Random, cuts: tuple[str, ...]) -> list[int]:
    copies = [[node for node, cut in enumerate(cuts) if cut == layers] for layers in sorted(set(cuts))]
    if all(len(nodes) == 1 for nodes in copies):
        return [rng.randrange(len(cuts))]
    return [node for nodes in copies for node in rng.sample(nodes, len(nodes) - 1)]
