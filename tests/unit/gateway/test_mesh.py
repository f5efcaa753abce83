"""All nodes together: who is connected, who is meant, what people see."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from gateway.open_link import OpenLink
from shared.errors import LinkClosed
from shared.messages import Cancel, Hello, LoadProgress, NodeStats, Release
from tests.support.memory_mesh import expected, idle, scripted_mesh
from tests.support.scripted_node import Drop, Miss, nth


async def test_nodes_are_known_once_they_are_connected() -> None:
    """And not before."""
    async with scripted_mesh(wait_ready=False) as mesh:
        assert mesh.mesh.nodes() == []
        assert mesh.view.missing_route() == "no node is connected"
        await mesh.until(mesh.view.ready)
        assert [info.node for info in mesh.mesh.nodes()] == ["a", "b", "c"]
        assert mesh.view.missing_route() is None


async def test_a_node_that_goes_and_comes_back_is_itself_again() -> None:
    """No ghost: the same id, the new process."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].stop()
        await idle()
        assert not mesh.view.ready()
        assert mesh.mesh.link("b") is None
        mesh.nodes[1].reachable = True
        await mesh.until(mesh.view.ready)
        assert [(info.node, info.pid) for info in mesh.mesh.nodes()] == [("a", 1000), ("b", 1001), ("c", 1000)]


async def test_of_two_nodes_with_the_same_id_the_first_configured_is_used() -> None:
    """As long as it is connected; then the other one takes its place."""
    options = {0: {"node_id": "x", "address": "ws://first"}, 1: {"node_id": "x", "address": "ws://second"}}
    async with scripted_mesh(["0:6", "0:6"], node_options=options) as mesh:
        first, second = mesh.nodes
        assert await mesh.drive(mesh.generate()) == expected()
        assert (first.steps.total(), second.steps.total()) == (9, 0)
        assert [node["state"] for node in mesh.view.snapshot()["nodes"]] == ["ready", "duplicate"]
        first.stop()
        await idle()
        assert await mesh.drive(mesh.generate()) == expected()
        assert second.steps.total() == 9


async def test_listeners_hear_of_every_change() -> None:
    """Who waits for a node need not poll."""
    async with scripted_mesh() as mesh:
        heard: list[int] = []
        mesh.mesh.listen(lambda: heard.append(len(mesh.mesh.nodes())))
        changed = mesh.mesh.changed
        mesh.nodes[0].stop()
        await idle()
        assert heard == [2]
        assert changed.is_set()
        assert not mesh.mesh.changed.is_set()


async def test_both_processes_of_one_id_are_told_that_a_session_has_ended() -> None:
    """An answer that went on at the second, after the first had stopped for a while, leaves nothing on either."""
    options = {0: {"node_id": "x", "address": "ws://first"}, 1: {"node_id": "x", "address": "ws://second"}}
    async with scripted_mesh(["0:6", "0:6"], node_options=options) as mesh:
        mesh.mesh.post("x", Release(session="s"))
        await idle()
        assert [node.ended for node in mesh.nodes] == [[Release(session="s")]] * 2


async def test_posting_to_a_node_never_heard_of_does_nothing() -> None:
    """Nothing can be held there."""
    async with scripted_mesh() as mesh:
        mesh.mesh.post("stranger", Release(session="s"))
        await idle()
        assert [node.ended for node in mesh.nodes] == [[], [], []]


async def test_a_fault_of_one_link_leaves_the_others_alone() -> None:
    """Whatever one address makes dialling or serving raise, the other nodes' answers go on, and it is dialled again."""
    async with scripted_mesh() as mesh:
        node = mesh.nodes[1]
        failing = [ValueError("no such host"), AssertionError()]
        plain = mesh.mesh._diallers[1]._dial

        async def dial(url: str, hello: Hello) -> OpenLink:
            if failing:
                raise failing.pop()
            return await plain(url, hello)

        mesh.mesh._diallers[1]._dial = dial
        node.stop()
        node.reachable = True
        await mesh.until(lambda: not failing)
        await mesh.until(mesh.view.ready)
        assert await mesh.drive(mesh.generate()) == expected()


async def test_stopping_closes_every_link() -> None:
    """Cancelling `run` leaves no node connected and no task waiting."""
    async with scripted_mesh() as mesh:
        mesh.nodes[0].script = nth(0, Drop())
        asking = asyncio.create_task(mesh.generate())
        await idle()
        links = [link for node in mesh.nodes for link in node.links]
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert len(links) == 3
    assert all(link.is_closed for link in links)
    assert mesh.mesh.nodes() == []


async def test_stopping_still_tells_nodes_which_sessions_have_ended() -> None:
    """A gateway that ends in mid-answer leaves nothing to their time to live."""
    async with scripted_mesh() as mesh:
        generation = mesh.generator.generation(mesh.request())
        tokens = await mesh.drive(generation.__aenter__())
        await mesh.drive(anext(tokens))
        await generation.__aexit__(None, None, None)
    assert all(node.ended == [Cancel(session="s1")] for node in mesh.nodes)


@pytest.mark.parametrize("turns", range(8))
async def test_stopping_ends_although_a_link_fails_in_that_moment(turns: int) -> None:
    """A link's own fault does not make it forget that it is to stop."""
    async with asyncio.timeout(10):
        async with scripted_mesh() as mesh:
            mesh.nodes[1].cut()
            for _ in range(turns):
                await asyncio.sleep(0)
        assert not any(link.is_open for link in mesh.mesh.links)


async def test_the_snapshot_is_json_and_shows_what_happened() -> None:
    """The figures of GET /mesh, after one generation with one miss."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = nth(5, Miss("expired"))
        await mesh.drive(mesh.generate())
        await mesh.drive(mesh.view.refresh())
        snapshot = json.loads(json.dumps(mesh.view.snapshot()))
    assert snapshot["ready"] is True
    assert snapshot["route"] == [
        {"node": "a", "layers": [0, 2]},
        {"node": "b", "layers": [2, 4]},
        {"node": "c", "layers": [4, 6]},
    ]
    node = snapshot["nodes"][1]
    assert (node["id"], node["pid"], node["layers"], node["state"]) == ("b", 1000, [2, 4], "ready")
    assert (node["context_len"], node["features"]) == (0, ["fork", "rewind", "score", "embed"])
    assert node["steps"] == {"prefill": 2, "decode": 9, "stateless": 0}
    assert node["sessions"] == 0
    assert node["link"]["connected"] is True
    assert node["link"]["round_trip_ms"] == 0.0
    assert node["link"]["sent_frames"]["step"] == 12
    assert node["link"]["received_frames"]["cache_miss"] == 1
    gateway = snapshot["gateway"]
    assert gateway["generations"] == {"started": 1, "completed": 1, "cancelled": 0, "failed": 0, "refused": 0}
    assert (gateway["active"], gateway["queued"], gateway["journal_bytes"]) == (0, 0, 0)
    assert (gateway["replays"], gateway["full_replays"], gateway["misses"]) == (1, 0, 1)


async def test_the_snapshot_counts_what_is_under_way() -> None:
    """Active generations, their journals and the sessions they reserve."""
    async with scripted_mesh() as mesh:
        async with mesh.generator.generation(mesh.request()) as tokens:
            await mesh.drive(anext(tokens))
            gateway = mesh.view.snapshot()["gateway"]
        assert gateway["active"] == 1
        assert gateway["journal_bytes"] > 0
        assert gateway["passes"] == 2
        assert gateway["reserved"] == {"a": 1, "b": 1, "c": 1}
        await idle()
        mesh.assert_nothing_left()


async def test_the_snapshot_shows_nodes_that_are_not_there() -> None:
    """By address, with the reason, before and after they were known."""
    async with scripted_mesh() as mesh:
        mesh.nodes[0].stop()
        mesh.nodes[1].tell(LoadProgress(done_bytes=1, total_bytes=4))
        await mesh.drive(mesh.clock.sleep(1))
        snapshot = mesh.view.snapshot()
        gone, loading = snapshot["nodes"][:2]
    assert snapshot["ready"] is False
    assert snapshot["route"] is None
    assert snapshot["reason"] == (
        "layers 0:6 of 6 are not covered by ready nodes; none begins at layer 0, as one must (2:4, 4:6 do not)"
        "; a (0:2) has been away for 1 s: unreachable"
    )
    assert (gone["state"], gone["id"], gone["url"]) == ("unreachable", "a", "ws://a")
    assert gone["link"]["last_error"]["code"] == "unreachable"
    assert loading["load_progress"] == {"done_bytes": 1, "total_bytes": 4}


async def test_a_node_never_reached_is_shown_without_description() -> None:
    """All that is known is its address."""
    async with scripted_mesh(wait_ready=False) as mesh:
        node = mesh.view.snapshot()["nodes"][0]
        await mesh.drive(mesh.view.refresh())
    assert (node["id"], node["layers"], node["state"], node["url"]) == (None, None, "unreachable", "ws://a")


async def test_refreshing_waits_for_no_node_longer_than_told() -> None:
    """A stalled node keeps its old figures; the others' are new."""
    async with scripted_mesh() as mesh:
        mesh.nodes[0].stalled = True
        started_s = mesh.clock.monotonic()
        await mesh.drive(mesh.view.refresh(0.3))
        assert mesh.clock.monotonic() - started_s == pytest.approx(0.3)
        mesh.nodes[1].reachable = False
        mesh.nodes[1].cut()
        await mesh.drive(mesh.view.refresh(5.0))
        assert mesh.mesh.link("c") is not None


async def test_refreshing_survives_a_link_that_is_lost_meanwhile() -> None:
    """The snapshot says that it is not connected."""
    async with scripted_mesh() as mesh:
        mesh.nodes[0].stalled = True
        refreshing = asyncio.create_task(mesh.view.refresh(5.0))
        await idle()
        mesh.nodes[0].reachable = False
        mesh.nodes[0].cut()
        await mesh.drive(refreshing)
        with pytest.raises(LinkClosed):
            await mesh.mesh.links[0].measure()


async def test_a_node_that_changes_its_range_is_routed_anew() -> None:
    """A plan may change while the gateway runs."""
    async with scripted_mesh(["0:3", "3:6", "0:3"]) as mesh:
        info = mesh.nodes[1].info
        mesh.nodes[1].become(replace(info, state="draining"))
        await idle()
        assert mesh.view.missing_route() == "layers 3:6 of 6 are not covered by ready nodes; b (3:6) is draining"


async def test_a_lost_node_is_named_with_its_layers_and_since_when() -> None:
    """Where the route is gone, whoever asks is told which node to look for."""
    async with scripted_mesh(["0:3", "3:6"]) as mesh:
        assert mesh.view.readiness() | {"nodes": None} == {"reason": None, "missing_layers": [], "nodes": None}
        mesh.nodes[1].reachable = False
        mesh.nodes[1].cut()
        await idle()
        await mesh.drive(mesh.clock.sleep(12.0))
        readiness = mesh.view.readiness()
        assert readiness["missing_layers"] == [[3, 6]]
        assert "layers 3:6 of 6 are not covered by ready nodes; b (3:6) has been away for 12 s:" in readiness["reason"]
        there, away = readiness["nodes"]
        assert (there["id"], there["state"], there["away_s"]) == ("a", "ready", None)
        assert (away["id"], away["state"], away["layers"]) == ("b", "unreachable", [3, 6])
        assert away["away_s"] == pytest.approx(12.0, abs=0.5)
        mesh.nodes[1].reachable = True
        await mesh.drive(mesh.clock.sleep(5.0))
        assert mesh.view.readiness()["nodes"][1]["away_s"] is None
        assert mesh.view.missing_route() is None


async def test_what_nodes_say_of_their_memory_is_shown() -> None:
    """With the last heartbeat; of a node that does not say, nothing is made up."""
    async with scripted_mesh(["0:3", "3:6"]) as mesh:
        mesh.mesh.links[0].stats = NodeStats(
            steps={}, misses={}, evictions={}, errors={}, memory_bytes=7, memory_limit_bytes=9, weights_bytes=5
        )
        shown = [
            [node[key] for key in ("memory_bytes", "memory_limit_bytes", "weights_bytes")]
            for node in mesh.view.readiness()["nodes"]
        ]
        assert shown == [[7, 9, 5], [None] * 3]
        assert mesh.view.snapshot()["nodes"][0]["memory_limit_bytes"] == 9
