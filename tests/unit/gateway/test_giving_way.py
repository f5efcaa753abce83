"""Sessions that wait for each other's places: one gives way, and both end with the tokens that they would have alone.

Four nodes with one place each serve two sessions: ``s1``, which came first, at ``a`` and ``b``, ``s2`` at the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.admission import Admission, Demand
from gateway.errors import GenerationFailed
from gateway.giving_way import givers, take_places
from gateway.places import Claim
from gateway.relay import Generation
from shared.layers import LayerRange
from shared.messages import Cancel, NodeInfo
from tests.support.memory_mesh import ScriptedMesh, expected, idle, scripted_mesh, seeded

CUTS = ("0:3", "3:6", "0:3", "3:6")
LONG_PROMPT = tuple(range(100, 119))
TOKENS = 24
FAILOVER_S = 5.0
"""Shorter than an answer takes here: nobody may be lost for waiting so long for a place that another session has."""


def room_for_one(**of_all: Any) -> dict[int, dict[str, Any]]:
    """On each node; a step takes half a second."""
    return {index: {"sessions_max": 1, "step_s": 0.5, **of_all} for index in range(len(CUTS))}


async def run_two(mesh: ScriptedMesh, happen: Callable[[], None]) -> list[list[int] | BaseException]:
    """Two answers, in the middle of which something happens; what came of each."""
    both = [asyncio.ensure_future(mesh.generate(TOKENS)) for _ in range(2)]
    await mesh.drive(mesh.clock.sleep(4.0))
    assert [[step.session for step in node.seen[:1]] for node in mesh.nodes] == [["s1"], ["s1"], ["s2"], ["s2"]]
    happen()
    return await mesh.drive(asyncio.gather(*both, return_exceptions=True))


def lose(mesh: ScriptedMesh, nodes: str) -> None:
    """Lose these for good."""
    for node in mesh.nodes:
        if node.node_id in nodes:
            node.stop()


def hold(mesh: ScriptedMesh, index: int, layers: str) -> None:
    """Give a node another range; what it held is gone."""
    node = mesh.nodes[index]
    node.layers = LayerRange.parse(layers)
    node.sessions.clear()
    node.become(node.info)


def given(mesh: ScriptedMesh, nodes: str) -> list[str]:
    """Sessions that these were told to forget before their end."""
    told = [message for node in mesh.nodes if node.node_id in nodes for message in node.ended]
    return [message.session for message in told if isinstance(message, Cancel)]


@pytest.mark.parametrize("journal_bytes_max", [1 << 30, 0])
@pytest.mark.parametrize(("lost", "left"), [("ad", "bc"), ("bc", "ad")])
async def test_of_two_sessions_that_wait_for_each_others_places_the_later_one_gives_way(
    lost: str, left: str, journal_bytes_max: int
) -> None:
    """Each is where the other has to go. Journals rebuild what was given, or the token ids where they were dropped."""
    settings = {"failover_timeout_s": FAILOVER_S, "journal_bytes_max": journal_bytes_max}
    async with scripted_mesh(CUTS, node_options=room_for_one(), **settings) as mesh:
        assert await run_two(mesh, lambda: lose(mesh, lost)) == [expected(TOKENS)] * 2
        await idle()
        assert given(mesh, left) == ["s2"]
        totals = mesh.generator.totals
        assert totals.replays <= 3, "the two hops that were lost, and the one that was given"
        assert (totals.full_replays > 0) == (not journal_bytes_max)
        mesh.assert_nothing_left()


async def test_sessions_that_hold_halves_of_the_only_route_left_do_not_wait_for_each_other() -> None:
    """It is cut elsewhere: the first takes all of it, and the other begins again on it after that."""
    async with scripted_mesh(CUTS, node_options=room_for_one(), failover_timeout_s=FAILOVER_S) as mesh:

        def happen() -> None:
            lose(mesh, "bd")
            hold(mesh, 0, "0:2")
            hold(mesh, 2, "2:6")

        assert await run_two(mesh, happen) == [expected(TOKENS)] * 2
        await idle()
        assert mesh.generator.totals.reroutes == 2
        mesh.assert_nothing_left()


async def test_a_session_without_any_node_gives_way_to_a_later_one() -> None:
    """It can do nothing with its places. It still ends when the failover timeout is over."""
    async with scripted_mesh(CUTS, node_options=room_for_one(), failover_timeout_s=FAILOVER_S) as mesh:
        mesh.nodes[3].become(replace(mesh.nodes[3].info, dtype="bf16"))  # so d replaces b for no session of b's
        await idle()
        started_s = mesh.clock.monotonic()
        first, second = await run_two(mesh, lambda: lose(mesh, "bc"))
        assert isinstance(first, GenerationFailed)
        assert first.code == "node_lost"
        assert second == expected(TOKENS)
        assert given(mesh, "a")[:1] == ["s1"]
        assert mesh.clock.monotonic() - started_s > FAILOVER_S + TOKENS / 2
        mesh.assert_nothing_left()


async def test_nothing_is_given_that_nobody_needs() -> None:
    """Both wait for the same node, which comes back: it alone is prefilled again."""
    options = {0: {"step_s": 0.1}, 1: {"step_s": 0.1}}
    async with scripted_mesh(CUTS[:2], node_options=options) as mesh:
        both = [asyncio.ensure_future(mesh.generate()) for _ in range(2)]
        await mesh.drive(mesh.clock.sleep(0.9))
        mesh.nodes[1].restart()
        assert await mesh.drive(asyncio.gather(*both)) == [expected()] * 2
        await idle()
        assert mesh.prefills() == [2, 4]
        assert given(mesh, "ab") == []


async def test_choices_that_have_not_begun_give_way_with_the_one_that_computes_their_prompt() -> None:
    """They have places and nobody who would wait for others on their behalf."""
    options = {index: {"sessions_max": 1 + index // 2, "step_s": 0.5} for index in range(len(CUTS))}
    async with scripted_mesh(CUTS, node_options=options, failover_timeout_s=FAILOVER_S) as mesh:
        first = asyncio.ensure_future(mesh.generate(TOKENS))
        others = asyncio.ensure_future(mesh.generate_choices(4, choices=seeded(1, 2), prompt_ids=LONG_PROMPT))
        await mesh.until(lambda: len(mesh.nodes[3].seen) == 2)
        lose(mesh, "ad")
        assert await mesh.drive(first) == expected(TOKENS)
        alone = [expected(4, sampling=sampling, prompt_ids=LONG_PROMPT) for sampling in seeded(1, 2)]
        assert await mesh.drive(others) == alone
        await idle()
        assert given(mesh, "c") == ["s3"], "s2 has a cache there, s3 has none yet"
        mesh.assert_nothing_left()


# --- who gives, by value ------------------------------------------------------------------------------


def node(node_id: str, **fields: Any) -> NodeInfo:
    """A node of all of a model's two layers, with one place."""
    info = NodeInfo(node=node_id, model="m", layers=LayerRange(0, 2), num_layers=2, state="ready", kv_sessions_max=1)
    return replace(info, **fields)


def admission_of(**places: str) -> Admission:
    """Sessions in the order in which they came, each with its node."""
    admission = Admission(model="m", num_layers=2, queue_max=9)
    for session, where in places.items():
        admission.enqueue(Demand(sessions=(session,), tokens=10, tokens_min=1), [node(where)])
        admission.admit([node(where)])
        admission.begin(session)
    return admission


def generation_of(admission: Admission, session: str, nodes: list[NodeInfo], posted: list[str]) -> Generation:
    """As much of a generation as is looked at."""
    mesh = SimpleNamespace(nodes=lambda: nodes, post=lambda node, message: posted.append(f"{node} {message.session}"))
    return cast("Generation", SimpleNamespace(admission=admission, mesh=mesh, session=SimpleNamespace(id=session)))


def claim_of(*nodes: str) -> Claim:
    """Waits for any of these."""
    return Claim(lambda node: node.node in nodes)


@pytest.mark.parametrize(
    ("waiting", "taker", "giving"),
    [
        ({}, "s1", []),
        ({"s2": "a"}, "s1", ["s2"]),
        ({"s1": "b"}, "s2", []),
        ({"s1": "gone"}, "s2", ["s1"]),
        ({"s2": "free"}, "s1", []),
        ({"s2": "gone", "s3": "b"}, "s1", ["s2"]),
    ],
    ids=["works", "later", "earlier", "without a node", "about to go on", "elsewhere"],
)
def test_who_gives_way(waiting: dict[str, str], taker: str, giving: list[str]) -> None:
    """One that waits in vain and came later, or that has no node at all; of those that are where one has to go."""
    admission = admission_of(s1="a", s2="b", s3="c")
    nodes, wanted = [node("a"), node("b"), node("c"), node("free")], {"s1": "b", "s2": "a"}[taker]
    admission.claims.update({session: claim_of(where) for session, where in waiting.items()})
    assert givers(generation_of(admission, taker, nodes, []), claim_of(wanted)) == giving


def test_as_few_give_way_as_make_room_the_youngest_first() -> None:
    """Of three that wait, two have to leave for one that needs more."""
    small, posted = node("a", kv_sessions_max=4, kv_bytes_max=1024, kv_bytes_per_token=1), list[str]()
    admission = Admission(model="m", num_layers=2, queue_max=9)
    for session, tokens, where in (("s1", 400, node("b")), ("s2", 10, small), ("s3", 10, small), ("s4", 10, small)):
        admission.enqueue(Demand(sessions=(session,), tokens=tokens, tokens_min=1), [where])
        admission.admit([where])
        admission.begin(session)
        admission.claims[session] = claim_of("b")
    generation = generation_of(admission, "s1", [small, node("b")], posted)
    giving = givers(generation, claim_of("a"))
    assert giving == ["s4", "s3", "s2"]
    take_places(generation, [small], giving)
    assert posted == ["a s4", "a s3"]
    assert admission.places("s2") == {"a"}
