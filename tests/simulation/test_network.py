"""One way between gateway and node alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.liveness import SILENCE_MAX_S, TICK_S
from shared.messages import SamplingParams
from tests.simulation.schedule import Call, Event, Schedule
from tests.simulation.virtual_loop import VirtualLoop
from tests.simulation.world import World

CALL = Call(
    "generate",
    at_s=0.0,
    prompt_ids=(1, 2, 3),
    max_tokens=40,
    choices=(SamplingParams(temperature=0.0),),
    finish_after=(99,),
)
SLOW = {"step_s": 0.1}
SCHEDULE = Schedule(
    seed=0,
    is_harsh=False,
    cuts=("0:3", "3:6", "3:6"),
    node_options=(SLOW, SLOW, SLOW),
    joins_at_s=(0.0, 0.0, 0.0),
    settings={"journal_bytes_max": 1 << 30},
    calls=(CALL,),
)


class WatchedWorld(World):
    """Notes when the second node is no longer linked."""

    lost_at_s: float | None = None

    def watch(self) -> None:
        """At every step."""
        super().watch()
        if self.lost_at_s is None and not self.gateways[0].mesh.links[1].is_open:
            self.lost_at_s = self.clock.monotonic() - self.began_at


@pytest.mark.parametrize("kind", ["deafen", "mute"])
def test_one_way_that_is_cut_is_noticed_as_both(kind: str) -> None:
    """Silence closes the link in time, and the replica goes on with the reference's tokens."""
    world = WatchedWorld(replace(SCHEDULE, events=(Event(1.0, kind, 1, 20.0),)))
    loop = VirtualLoop()
    loop.on_idle = world.on_idle
    try:
        loop.run_until_complete(world.play())
    finally:
        loop.close()
    assert world.ends == {0: "complete"}
    assert world.tally["gateway moves"] == 1
    assert world.lost_at_s is not None
    step_s = 0.2
    assert 1.0 + SILENCE_MAX_S - TICK_S - 0.5 <= world.lost_at_s <= 1.0 + SILENCE_MAX_S + TICK_S + 0.5 + step_s
