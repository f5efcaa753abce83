"""What a joined node's link carries: measured while nobody needs it, unknown where the node does not play along."""

from __future__ import annotations

import asyncio

import pytest

from gateway.bandwidth import ANSWER_S_MAX, SIZES_BYTES, TRIES
from gateway.node_link import NodeLink
from shared.cli.operate import live_plan_text
from tests.support.live_fleet import LiveFleet, live_fleet, machine
from tests.support.memory_mesh import SEEDED, expected, idle
from tests.support.scripted_joiner import JoiningNode


def link_of(fleet: LiveFleet, node: JoiningNode) -> NodeLink:
    """The gateway's side."""
    return next(link for link in fleet.mesh.mesh.links if link.node == node.node_id)


def plan_lines(fleet: LiveFleet) -> list[str]:
    """What `meshnet plan --gateway` prints."""
    snapshot = fleet.mesh.view.snapshot()
    return list(live_plan_text(snapshot, snapshot["plan"]))


@pytest.mark.parametrize(
    ("bytes_per_s", "sizes"), [(200_000.0, 1), (4_000_000.0, 1), (40_000_000.0, 2), (900_000_000.0, 3)]
)
@pytest.mark.parametrize("round_trip_s", [0.0, 0.05])
async def test_a_link_is_measured_with_as_much_as_its_speed_needs(
    bytes_per_s: float, sizes: int, round_trip_s: float
) -> None:
    """Round trips do not count as bandwidth, and a slow link is not held up by megabytes."""
    async with live_fleet() as fleet:
        node = fleet.join("a", machine=machine(6), bytes_per_s=bytes_per_s, round_trip_s=round_trip_s)
        await fleet.mesh.until(lambda: link_of(fleet, node).bytes_per_s is not None)
        assert link_of(fleet, node).bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
        assert node.probes == TRIES * (1 + sizes)
        await fleet.until_ready()
        assert (await fleet.mesh.drive(fleet.mesh.generate())) == expected()
        assert node.probes == TRIES * (1 + sizes), "once is enough"


@pytest.mark.parametrize("options", [{"bytes_per_s": None}, {"ignores_probes": True}])
async def test_a_node_that_does_not_play_along_has_no_bandwidth(options: dict[str, object]) -> None:
    """An old one says that it knows no probes, another says nothing: it serves like any other, and the plan says so."""
    async with live_fleet() as fleet:
        node = fleet.join("a", machine=machine(6), **options)
        await fleet.until_ready()
        assert await fleet.mesh.drive(fleet.mesh.generate()) == expected()
        await fleet.mesh.drive(fleet.mesh.clock.sleep(2 * ANSWER_S_MAX))
        assert node.probes == 1
        assert link_of(fleet, node).bytes_per_s is None
        assert link_of(fleet, node).connects == 1
        assert fleet.mesh.view.snapshot()["nodes"][0]["link"]["bandwidth_mbit"] is None
        assert any("bandwidth unknown" in line for line in plan_lines(fleet))


async def test_the_plan_counts_the_way_of_the_bytes() -> None:
    """A token's hidden state over the boundary, in the figures and in words; and it makes tokens slower."""
    async with live_fleet() as fleet:
        nodes = [fleet.join(name, machine=machine(3), bytes_per_s=100_000.0) for name in "ab"]
        await fleet.mesh.until(lambda: all(link_of(fleet, node).bytes_per_s is not None for node in nodes))
        await fleet.until_ready()
        snapshot = fleet.mesh.view.snapshot()
        for node in snapshot["nodes"]:
            assert node["link"]["bandwidth_mbit"] == pytest.approx(0.8, rel=0.01)
        (first,), (last,) = (stage["nodes"] for stage in snapshot["plan"]["stages"])
        assert first["predicted_transfer_ms"] == last["predicted_transfer_ms"] == pytest.approx(4.6, rel=0.01)
        assert first["predicted_token_ms"] > 4.6
        assert sum("0.8 Mbit/s; a token's bytes take 4.6" in line for line in plan_lines(fleet)) == 2


async def test_no_probe_is_sent_while_a_stream_runs_over_the_link() -> None:
    """A node that comes back in the middle of an answer is measured after it."""
    async with live_fleet() as fleet:
        node = fleet.join("a", machine=machine(6), bytes_per_s=50_000_000.0)
        await fleet.until_ready()
        node.step_s = 0.2
        reading = asyncio.ensure_future(fleet.mesh.generate(60, sampling=SEEDED))
        await fleet.mesh.until(lambda: len(node.seen) > 5)
        before = node.probes
        node.cut()
        await fleet.mesh.until(lambda: link_of(fleet, node).connects == 2)
        steps = len(node.seen)
        await fleet.mesh.until(lambda: len(node.seen) > steps + 10)
        assert not reading.done()
        assert node.probes == before
        assert await fleet.mesh.drive(reading) == expected(60, sampling=SEEDED)
        await idle()
        await fleet.mesh.until(lambda: node.probes > before)
        await fleet.mesh.drive(fleet.mesh.clock.sleep(1.0))
        assert link_of(fleet, node).bytes_per_s == pytest.approx(50_000_000.0, rel=0.01)


def test_probes_stay_small() -> None:
    """At most these megabytes pass a link when a node joins, and none waits for long."""
    assert TRIES * sum(SIZES_BYTES) < 10 * 1024 * 1024
