"""A live fleet in memory: nodes join, get ranges, fail, restart and leave, while answers go on with the same tokens."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.fleet.drain import REPLANNED_S_MAX, DrainRefused
from gateway.fleet.state import DEFAULT_POLICY
from gateway.generation_request import Token
from gateway.observed import ALONE_STEPS_MIN
from shared.cli.operate import live_plan_text
from shared.layers import LayerRange
from shared.messages import Cancel, Drain, Loaded, Release, Step
from tests.support.live_fleet import LiveFleet, live_fleet, machine
from tests.support.memory_mesh import SEEDED, expected, idle
from tests.support.scripted_node import MODEL, Crash

MESH = {"num_layers": 6, "reason": None}
PAGE = Path(__file__).parents[4] / "docs" / "operations.md"


async def stream(fleet: LiveFleet, seen: list[int], max_tokens: int, pause_s: float = 0.5) -> None:
    """Read one answer slowly."""
    request = fleet.mesh.request(max_tokens, sampling=SEEDED)
    async with fleet.mesh.generator.generation(request) as tokens:
        async for token in tokens:
            assert isinstance(token, Token)
            seen.append(token.id)
            await fleet.mesh.clock.sleep(pause_s)


async def test_nodes_that_join_are_given_the_model_between_them() -> None:
    """And serve. Each was told once, where to find the files as well."""
    async with live_fleet() as fleet:
        nodes = [fleet.join(node, machine=machine(3)) for node in "ab"]
        await fleet.until_ready()
        assert sorted(fleet.held().values()) == ["0:3", "3:6"]
        assert await fleet.mesh.drive(fleet.mesh.generate()) == expected()
        (load,) = nodes[0].loads
        assert (load.model, load.model_name, load.files) == (MODEL, "scripted", "/files")
        assert [len(node.loads) for node in nodes] == [1, 1]
        await idle()
        fleet.mesh.assert_nothing_left()


async def test_nodes_with_ranges_of_their_own_take_part() -> None:
    """The plan fills what one that is dialled leaves open."""
    async with live_fleet(("2:4",)) as fleet:
        fleet.join("x", machine=machine(2))
        fleet.join("y", machine=machine(2))
        await fleet.until_ready()
        assert sorted(fleet.held().values()) == ["0:2", "2:4", "4:6"]
        assert await fleet.mesh.drive(fleet.mesh.generate()) == expected()


async def test_what_ends_a_session_reaches_a_joined_node_that_was_out_of_reach() -> None:
    """It held no range when it joined, and said what process it is only with its first one."""
    async with live_fleet() as fleet:
        node = fleet.join("a", machine=machine(6))
        await fleet.until_ready()
        link = fleet.mesh.mesh.link("a")
        assert link is not None
        node.cut()
        await fleet.mesh.until(lambda: not link.is_open)
        link.post(Cancel(session="s"))
        await fleet.mesh.until(lambda: node.ended == [Cancel(session="s")])


async def test_a_node_that_was_given_the_layers_of_another_hop_keeps_the_session() -> None:
    """The hop that it had leaves it only when it is asked for again, and must not take the other's cache along."""
    async with live_fleet(("0:3", "0:3", "3:6")) as fleet:
        await fleet.until_ready()
        first, second, last = fleet.mesh.nodes

        def exchange(_step: Step, count: int) -> Crash | None:
            """In the second token's pass, between its two hops."""
            if count != 1:
                return None
            serving = first if first.sessions else second
            serving.layers = LayerRange(3, 6)
            serving.sessions.clear()
            serving.become(serving.info)
            return Crash()

        last.script = exchange
        assert await fleet.mesh.drive(fleet.mesh.generate(4, sampling=SEEDED)) == expected(4, sampling=SEEDED)
        serving, other = (first, second) if first.layers == last.layers else (second, first)
        assert [step.cache for step in serving.seen if step.layers == last.layers].count("prefill") == 1
        assert serving.ended == other.ended == [Release(session="s1")]
        await idle()
        fleet.mesh.assert_nothing_left()


async def test_what_a_node_says_last_is_whether_it_is_to_go() -> None:
    """A range that it is ready with takes a farewell back, and one that it drains with says it again."""
    async with live_fleet() as fleet:
        node = fleet.join("a", machine=machine(6))
        await fleet.until_ready()
        node.tell(Drain())
        await fleet.mesh.until(lambda: fleet.mesh.mesh.is_leaving("a"))
        node.tell(Loaded(node=node.info))
        await idle()
        assert not fleet.mesh.mesh.is_leaving("a")
        node.tell(Loaded(node=replace(node.info, state="draining")))
        await idle()
        assert fleet.mesh.mesh.is_leaving("a")


async def test_a_restarted_node_gets_its_range_back_and_the_stream_goes_on() -> None:
    """It waits for the load, within the failover's time."""
    async with live_fleet() as fleet:
        first = fleet.join("a", machine=machine(3))
        fleet.join("b", machine=machine(3))
        await fleet.until_ready()
        had, seen = fleet.held(), list[int]()
        reading = asyncio.ensure_future(stream(fleet, seen, 8))
        await fleet.mesh.until(lambda: len(seen) == 3)
        first.restart()
        await fleet.mesh.drive(reading)
        assert seen == expected(8, sampling=SEEDED)
        assert fleet.held() == had
        assert len(first.loads) == 2
        await idle()
        fleet.mesh.assert_nothing_left()


async def test_a_lost_node_is_replaced_and_the_stream_goes_on() -> None:
    """A replica of the other range is spared for its layers, while the answer waits; the tokens stay the same."""
    async with live_fleet() as fleet:
        nodes = {node: fleet.join(node, machine=machine(3)) for node in "abc"}
        await fleet.mesh.until(lambda: len(fleet.held()) == 3)
        held = fleet.held()
        lone = next(node for node in held if list(held.values()).count(held[node]) == 1)
        seen: list[int] = []
        reading = asyncio.ensure_future(stream(fleet, seen, 8))
        await fleet.mesh.until(lambda: len(seen) == 3)
        started_s = fleet.mesh.clock.monotonic()
        nodes[lone].stop()
        await fleet.mesh.drive(reading)
        assert seen == expected(8, sampling=SEEDED)
        assert fleet.mesh.clock.monotonic() - started_s < DEFAULT_POLICY.grace_s / 2
        assert sorted(fleet.held().values()) == ["0:3", "3:6"]
        await idle()
        fleet.mesh.assert_nothing_left()


async def test_a_fleet_is_cut_anew_under_a_stream() -> None:
    """Two slow nodes give way to a fast one; the answer goes over it in its middle."""
    async with live_fleet() as fleet:
        for node in "ab":
            fleet.join(node, machine=machine(3, layer_ms=50))
        await fleet.until_ready()
        seen: list[int] = []
        reading = asyncio.ensure_future(stream(fleet, seen, 40))
        await fleet.mesh.until(lambda: len(seen) == 3)
        fleet.join("fast", machine=machine(6, layer_ms=1))
        await fleet.mesh.until(lambda: fleet.held().keys() == {"fast"})
        await fleet.mesh.drive(reading)
        assert seen == expected(40, sampling=SEEDED)
        assert fleet.mesh.generator.totals.reroutes == 1
        await idle()
        fleet.mesh.assert_nothing_left()


async def test_a_load_that_fails_is_given_to_others() -> None:
    """And why it failed is shown."""
    async with live_fleet() as fleet:
        fleet.join("a", machine=machine(6, layer_ms=1), fails={"0:6": "out of memory"})
        await fleet.mesh.until(lambda: fleet.mesh.mesh.links[0].load_error is not None)
        fleet.join("b", machine=machine(6, layer_ms=9))
        await fleet.until_ready()
        assert fleet.held() == {"b": "0:6"}
        shown = {figures["id"]: figures for figures in fleet.mesh.view.snapshot()["nodes"]}
        assert shown["a"]["load_error"] == "out of memory"
        assert shown["a"]["state"] == "failed"


async def test_a_cut_that_a_node_refuses_is_made_elsewhere() -> None:
    """Both are told anew."""
    async with live_fleet() as fleet:
        refusing = {"fails": {"3:6": "cut refused"}, "refused_cuts": (3,)}
        for node in "ab":
            fleet.join(node, machine=machine(4), **refusing)
        await fleet.until_ready()
        assert sorted(fleet.held().values()) in (["0:2", "2:6"], ["0:4", "4:6"])
        assert fleet.mesh.view.snapshot()["plan"]["refused_cuts"] == [3]


# --- draining --------------------------------------------------------------------------------------


async def test_a_drained_node_leaves_without_a_stream_noticing() -> None:
    """Its replica has its sessions by then, no step has failed, and it was told to go."""
    async with live_fleet() as fleet:
        for node in "abcd":
            fleet.join(node, machine=machine(3))
        await fleet.mesh.until(lambda: len(fleet.held()) == 4)
        seen: list[int] = []
        reading = asyncio.ensure_future(stream(fleet, seen, 12))
        await fleet.mesh.until(lambda: len(seen) == 3)
        busy = next(node for node in fleet.mesh.nodes if node.sessions)
        draining = asyncio.ensure_future(fleet.drainer.drain(busy.node_id))
        drained = await fleet.mesh.drive(draining)
        await fleet.mesh.drive(reading)
        assert (drained.sessions_left, drained.is_gone) == (0, True)
        assert seen == expected(12, sampling=SEEDED)
        totals = fleet.mesh.generator.totals
        assert (totals.misses, totals.moves + totals.reroutes) == (0, 1)
        assert busy.drains == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("announces", "level"), [(True, "info"), (False, "warning")])
async def test_a_node_that_said_that_it_leaves_is_no_reason_to_worry(announces: bool, level: str) -> None:
    """Its end is in the log all the same; one that says nothing is warned of."""
    async with live_fleet() as fleet:
        node = fleet.join("a", machine=machine(6))
        await fleet.until_ready()
        with capture_logs() as logs:
            if announces:
                node.drain()
                await idle()
            node.stop()
            await idle()
        (ended,) = (entry for entry in logs if entry["event"] == "node.disconnected")
        assert (ended["log_level"], ended["was_announced"]) == (level, announces)


async def test_a_node_is_replaced_before_it_is_told_to_go() -> None:
    """No replica was there: a newcomer loads its range first, and requests are served all the time."""
    async with live_fleet() as fleet:
        nodes = {node: fleet.join(node, machine=machine(3)) for node in "ab"}
        await fleet.until_ready()
        draining = asyncio.ensure_future(fleet.drainer.drain("a"))
        await fleet.mesh.drive(fleet.mesh.clock.sleep(REPLANNED_S_MAX - 1))
        assert nodes["a"].drains == 0
        assert "leaving" in fleet.fleet.pending
        assert await fleet.mesh.drive(fleet.mesh.generate()) == expected()
        fleet.join("c", machine=machine(3))
        assert (await fleet.mesh.drive(draining)).is_gone
        assert fleet.held().keys() >= {"b", "c"}
        nodes["a"].reachable = False
        assert await fleet.mesh.drive(fleet.mesh.generate()) == expected()


async def test_a_node_that_nothing_can_replace_stays() -> None:
    """The reason says what would be missing."""
    async with live_fleet() as fleet:
        fleet.join("a", machine=machine(6))
        await fleet.until_ready()
        started_s = fleet.mesh.clock.monotonic()
        with pytest.raises(DrainRefused, match="nothing can take the place of a: ") as refused:
            await fleet.mesh.drive(fleet.drainer.drain("a"))
        assert refused.value.code == "no_replacement"
        assert fleet.mesh.clock.monotonic() - started_s <= REPLANNED_S_MAX + 1
        await fleet.mesh.drive(fleet.mesh.clock.sleep(5.0))
        assert await fleet.mesh.drive(fleet.mesh.generate()) == expected()


async def test_a_node_that_others_are_too_small_to_replace_stays() -> None:
    """The plan's own words say why, within seconds."""
    async with live_fleet() as fleet:
        fleet.join("a", machine=machine(3))
        fleet.join("b", machine=machine(3))
        await fleet.until_ready()
        with pytest.raises(DrainRefused, match=r"nothing can take the place of a: .* no plan is possible"):
            await fleet.mesh.drive(fleet.drainer.drain("a"))
        assert await fleet.mesh.drive(fleet.mesh.generate()) == expected()


@pytest.mark.parametrize("has_sizes", [True, False])
async def test_nodes_that_wait_for_layers_are_named_with_what_the_plan_waits_for(has_sizes: bool) -> None:
    """`/readyz` and refused calls must not say that nobody is connected."""
    async with live_fleet() as fleet:
        if not has_sizes:
            fleet.fleet.forecast = None
        fleet.join("small", machine=machine(2))
        await fleet.mesh.drive(fleet.mesh.clock.sleep(10.0))
        readiness = fleet.mesh.view.readiness()
        why = "no plan is possible" if has_sizes else "cannot be told from its files"
        assert readiness["reason"].startswith("no node holds any layers; small waits for layers; ")
        assert why in readiness["reason"]
        assert [(node["id"], node["layers"], node["state"]) for node in readiness["nodes"]] == [
            ("small", None, "waiting")
        ]


async def test_who_is_drained_twice_or_not_there() -> None:
    """Both are said at once."""
    async with live_fleet() as fleet:
        fleet.join("a", machine=machine(6))
        await fleet.until_ready()
        draining = asyncio.ensure_future(fleet.drainer.drain("a"))
        await idle()
        with pytest.raises(DrainRefused, match="already"):
            await fleet.mesh.drive(fleet.drainer.drain("a"))
        with pytest.raises(DrainRefused, match="no node called x"):
            await fleet.mesh.drive(fleet.drainer.drain("x"))
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        assert not fleet.fleet.members.leaving, "who asked has left, so it stays"


async def test_a_node_that_says_that_it_leaves_is_replaced() -> None:
    """As after SIGTERM: the plan goes on without it while it serves on."""
    async with live_fleet() as fleet:
        nodes = {node: fleet.join(node, machine=machine(3)) for node in "abc"}
        await fleet.mesh.until(lambda: len(fleet.held()) == 3)
        held = fleet.held()
        lone = next(node for node in held if list(held.values()).count(held[node]) == 1)
        spare = next(node for node in held if node != lone)
        nodes[lone].drain()
        await fleet.mesh.until(
            lambda: fleet.held().get(spare) == held[lone] or sorted(fleet.held().values()) == ["0:3", "3:6"]
        )
        assert await fleet.mesh.drive(fleet.mesh.generate()) == expected()


# --- what is shown ---------------------------------------------------------------------------------


async def test_every_figure_of_a_plan_is_explained() -> None:
    """docs/operations.md names the keys of the plan, and no others."""
    async with live_fleet() as fleet:
        fleet.join("a", machine=machine(6))
        await fleet.until_ready()
        await fleet.mesh.drive(fleet.mesh.generate(12))
        plan = fleet.mesh.view.snapshot()["plan"]
    section = PAGE.read_text().partition("## The plan\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    explained = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert explained == set(plan) | set(plan["stages"][0]) | set(plan["stages"][0]["nodes"][0])
    assert plan["reason"] == "the first plan"
    assert plan["stages"][0]["nodes"][0]["observed_steps"] > 0
    assert plan["observed_tokens_per_s"] > 0
    assert plan["predicted_tokens_per_s"] > 0


async def test_what_steps_show_goes_before_what_was_measured() -> None:
    """A machine that promised 1 ms a layer takes 20: the plan says so after some steps, and is right within 20 %."""
    async with live_fleet() as fleet:
        node = fleet.join("a", machine=machine(6, layer_ms=1), step_s=0.12)
        await fleet.until_ready()
        promised = fleet.mesh.view.snapshot()["plan"]
        assert promised["stages"][0]["nodes"][0]["layer_ms_from"] == "measurement"
        assert promised["predicted_tokens_per_s"] > 100
        await fleet.mesh.drive(fleet.mesh.generate(ALONE_STEPS_MIN + 10))
        learned = fleet.mesh.view.snapshot()["plan"]
        assert learned["predicted_tokens_per_s"] == pytest.approx(learned["observed_tokens_per_s"], rel=0.2)
        assert learned["stages"][0]["nodes"][0]["layer_ms_from"] == "steps"
        assert any("ms a layer by its steps" in line for line in live_plan_text({**MESH, "ready": True}, learned))
        node.restart()
        await fleet.mesh.until(lambda: len(node.loads) == 2)
        await fleet.until_ready()
        assert fleet.mesh.mesh.links[0].alone.compute_s is None, "its steps are measured anew, what they showed is kept"
        kept = fleet.mesh.view.snapshot()["plan"]
        assert kept["predicted_tokens_per_s"] == learned["predicted_tokens_per_s"]


async def test_steps_that_share_a_node_show_no_pace() -> None:
    """What one waits for another, or computes with it, is not what it takes alone."""
    async with live_fleet() as fleet:
        fleet.join("a", machine=machine(6, layer_ms=1), step_s=0.12)
        await fleet.until_ready()
        both = asyncio.gather(*(fleet.mesh.generate(ALONE_STEPS_MIN + 10) for _ in range(2)))
        await fleet.mesh.drive(both)
        plan = fleet.mesh.view.snapshot()["plan"]
        assert plan["stages"][0]["nodes"][0]["layer_ms_from"] == "measurement"


async def test_people_are_shown_the_plan_in_words() -> None:
    """What is in force and why, who holds what, and what came of the promise."""
    async with live_fleet(("4:6",)) as fleet:
        fleet.join("j", machine=machine(4))
        await fleet.until_ready()
        await fleet.mesh.drive(fleet.mesh.generate(12))
        shown = fleet.mesh.view.snapshot()
    lines = "\n".join(live_plan_text(shown, shown["plan"]))
    assert "6 layers, planned for latency; 1 sessions of 16 tokens" in lines
    assert "the first plan" in lines
    assert re.search(r"[\d.]+ tokens/s observed in the last minute", lines)
    assert "j  layers 0:4, ready, 4 KiB weights" in lines
    assert "a  layers 4:6, ready, a range of its own" in lines
