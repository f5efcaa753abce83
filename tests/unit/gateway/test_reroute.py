"""A session whose hop nobody serves any more is led over nodes that are cut elsewhere, with the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import GenerationFailed
from gateway.generation_request import Token
from gateway.placing import RETURN_WAIT_S
from gateway.reroute import REROUTES_PER_PASS_MAX
from shared.layers import LayerRange
from shared.messages import Drain, Loaded, SamplingParams, Step
from tests.support.fake_model import expected_scores
from tests.support.memory_mesh import (
    NUM_LAYERS,
    PROMPT,
    SEEDED,
    ScriptedMesh,
    expected,
    idle,
    scripted_mesh,
    seeded,
)
from tests.support.scripted_node import VOCAB_SIZE, Crash, Miss, ScriptedNode, nth

CUTS = ("0:2", "2:4", "4:6", "0:3", "3:6")
LONG_PROMPT = tuple(range(100, 119))


@asynccontextmanager
async def two_cuts(**settings: Any) -> AsyncIterator[ScriptedMesh]:
    """Nodes a, b and c serve; d and e, which are cut elsewhere, cannot be reached yet."""
    away = {3: {"reachable": False}, 4: {"reachable": False}}
    async with scripted_mesh(CUTS, node_options=away, wait_ready=False, **settings) as mesh:
        await mesh.until(mesh.view.ready)
        yield mesh


def come(mesh: ScriptedMesh) -> None:
    """The other nodes arrive."""
    for node in mesh.nodes[3:]:
        node.reachable = True


def hold(node: ScriptedNode, layers: str) -> None:
    """The node is given another range, and what it held is gone."""
    node.layers = LayerRange.parse(layers)
    node.sessions.clear()
    node.tell(Loaded(node=node.info))


async def generate(mesh: ScriptedMesh, after: int, change: Callable[[], Any], **fields: Any) -> list[int]:
    """All tokens of one generation, with a change after some of them."""
    async with mesh.generator.generation(mesh.request(**fields)) as tokens:
        seen = [(await mesh.drive(anext(tokens))).id for _ in range(after)]
        await mesh.drive(_changed(mesh, change))
        while (token := await mesh.drive(anext(tokens, None))) is not None:
            assert isinstance(token, Token)
            seen.append(token.id)
    await idle()
    return seen


async def _changed(mesh: ScriptedMesh, change: Callable[[], Any]) -> None:
    change()
    await mesh.clock.sleep(0.5)


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("fields", [{}, {"sampling": SEEDED}, {"prompt_ids": LONG_PROMPT}], ids=["", "seeded", "long"])
async def test_a_lost_node_whose_range_nobody_has(hop: int, fields: dict[str, Any]) -> None:
    """It may come back for a moment, then the session goes on elsewhere: long before the failover's deadline."""
    async with two_cuts() as mesh:

        def lose() -> None:
            mesh.nodes[hop].stop()
            come(mesh)

        started_s = mesh.clock.monotonic()
        assert await generate(mesh, 3, lose, **fields) == expected(**fields)
        assert RETURN_WAIT_S <= mesh.clock.monotonic() - started_s < RETURN_WAIT_S + 2
        assert mesh.generator.totals.reroutes == 1
        assert mesh.nodes[3].steps["prefill"] == 1
        mesh.assert_nothing_left()


async def test_one_that_comes_back_in_time_keeps_its_session() -> None:
    """Rebuilding one hop is cheaper than all of them."""
    async with two_cuts() as mesh:
        mesh.nodes[1].script = nth(5, Crash(back_after_s=RETURN_WAIT_S / 2))
        assert await generate(mesh, 3, lambda: come(mesh)) == expected()
        assert mesh.generator.totals.reroutes == 0


async def test_a_node_that_was_given_another_range_is_not_waited_for() -> None:
    """It is there, and will not have the old one back: the session goes on at once."""
    async with scripted_mesh(("0:2", "2:4", "4:6")) as mesh:

        def change() -> None:
            hold(mesh.nodes[1], "2:6")
            hold(mesh.nodes[2], "2:6")

        started_s = mesh.clock.monotonic()
        assert await generate(mesh, 3, change, sampling=SEEDED) == expected(sampling=SEEDED)
        assert mesh.clock.monotonic() - started_s < 1.0
        assert mesh.generator.totals.reroutes == 1
        mesh.assert_nothing_left()


async def test_in_the_middle_of_a_prefill() -> None:
    """Chunks that have passed pass again, over the other nodes."""
    async with two_cuts() as mesh:
        mesh.nodes[1].script = nth(2, Crash(None))
        come_later = asyncio.ensure_future(_come_after(mesh, 0.5))
        assert await mesh.drive(mesh.generate(prompt_ids=LONG_PROMPT)) == expected(prompt_ids=LONG_PROMPT)
        await mesh.drive(come_later)
        assert mesh.generator.totals.reroutes + sum(f.reroutes for f in mesh.generator.running_figures()) > 0
        mesh.assert_nothing_left()


async def _come_after(mesh: ScriptedMesh, seconds: float) -> None:
    await mesh.clock.sleep(seconds)
    come(mesh)


async def test_several_choices_go_on_together() -> None:
    """Each is a session of its own, forked from the first."""
    async with two_cuts() as mesh:
        mesh.nodes[2].script = nth(6, Crash(None))
        come_later = asyncio.ensure_future(_come_after(mesh, 0.5))
        answers = await mesh.drive(mesh.generate_choices(6, choices=seeded(1, 2, 3)))
        await mesh.drive(come_later)
        assert mesh.generator.totals.reroutes + sum(f.reroutes for f in mesh.generator.running_figures()) > 0
        assert answers == [expected(6, sampling=choice) for choice in seeded(1, 2, 3)]
        await idle()
        mesh.assert_nothing_left()


async def test_scores_and_penalties_survive() -> None:
    """What is asked of the last hop beside tokens is asked of the new one."""
    sampling = SamplingParams(temperature=0.7, seed=3, frequency_penalty=0.5, prompt_len=len(LONG_PROMPT))
    async with two_cuts() as mesh:
        mesh.nodes[2].script = nth(3, Crash(None))
        come_later = asyncio.ensure_future(_come_after(mesh, 0.5))
        request = {"prompt_ids": LONG_PROMPT, "sampling": sampling}
        tokens, stream = await mesh.drive(mesh.generate_with_figures(6, prompt_logprobs=2, **request))
        await mesh.drive(come_later)
        assert mesh.generator.totals.reroutes + sum(f.reroutes for f in mesh.generator.running_figures()) > 0
        assert tokens == expected(6, **request)
        scores = expected_scores(LONG_PROMPT, 2, num_layers=NUM_LAYERS, vocab_size=VOCAB_SIZE)
        assert stream.prompt_scores.tokens[1:] == scores[-len(LONG_PROMPT) + 1 :]


async def test_another_element_type_is_no_other_route() -> None:
    """It would round differently in the middle of an answer."""
    async with two_cuts(failover_timeout_s=5.0) as mesh:

        def lose() -> None:
            mesh.nodes[1].stop()
            come(mesh)

        async def convert() -> None:
            await mesh.clock.sleep(0.3)
            for node in mesh.nodes[3:]:
                node.become(replace(node.info, dtype="bf16"))

        converting = asyncio.ensure_future(convert())
        with pytest.raises(GenerationFailed, match="in f32 came back"):
            await generate(mesh, 3, lose)
        await mesh.drive(converting)


async def test_a_route_without_room_is_no_other_route() -> None:
    """A session enters no node that has no place for it."""
    async with two_cuts(failover_timeout_s=5.0) as mesh:
        mesh.nodes[4].sessions_max = 0

        def lose() -> None:
            mesh.nodes[1].stop()
            come(mesh)

        with pytest.raises(GenerationFailed, match="came back"):
            await generate(mesh, 3, lose)


async def test_a_fleet_that_never_settles_is_given_up() -> None:
    """Whatever is prefilled is taken away again before it answers."""
    async with scripted_mesh(("0:2", "2:4", "4:6"), failover_timeout_s=5.0) as mesh:
        first, middle, last = mesh.nodes

        def unsettle(step: Step, _count: int) -> Miss | None:
            layers = "2:5" if middle.layers.end == 4 else "2:4"
            hold(middle, layers)
            hold(last, f"{middle.layers.end}:6")
            return Miss("range_mismatch")

        middle.script = unsettle
        with pytest.raises(GenerationFailed) as failed:
            await mesh.drive(mesh.generate())
        assert failed.value.code == "no_progress"
        assert mesh.generator.totals.reroutes == REROUTES_PER_PASS_MAX
        assert first.steps["prefill"] > REROUTES_PER_PASS_MAX


@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_a_leaving_node_is_left_for_a_replica_before_it_goes(hop: int) -> None:
    """No step fails for it."""
    async with scripted_mesh(("0:2", "2:4", "4:6", "0:2", "2:4", "4:6")) as mesh:
        tokens = await generate(mesh, 3, lambda: mesh.mesh.hold_back("abc"[hop]))
        assert tokens == expected()
        assert mesh.generator.totals.moves == 1
        assert mesh.generator.totals.misses == 0
        assert mesh.nodes[hop].sessions == {}
        mesh.assert_nothing_left()


async def test_a_leaving_node_is_left_for_another_route() -> None:
    """Where no replica is, but others cover all layers."""
    async with two_cuts() as mesh:

        def leave() -> None:
            come(mesh)
            mesh.mesh.hold_back("b")

        assert await generate(mesh, 3, leave) == expected()
        assert mesh.generator.totals.reroutes == 1
        assert mesh.clock.monotonic() < 1_000 + 2, "nobody had to wait"


async def test_a_leaving_node_serves_on_while_nobody_else_can() -> None:
    """It is not gone yet, and no other request is let in."""
    async with scripted_mesh() as mesh:
        assert await generate(mesh, 3, lambda: mesh.mesh.hold_back("b")) == expected()
        assert mesh.view.missing_route() is not None
        mesh.mesh.release("b")
        assert mesh.view.ready()


def test_the_prompt_is_longer_than_a_chunk():
    """What the tests above rely on."""
    assert len(LONG_PROMPT) > 2 * 4 > len(PROMPT)


async def test_a_node_that_stays_after_all_is_not_left() -> None:
    """It said that it drains, and then that it is ready: sessions are led to it and stay there."""
    async with scripted_mesh(("0:6",)) as mesh:
        node = mesh.nodes[0]
        node.state = "draining"
        node.tell(Drain())
        await mesh.until(lambda: mesh.mesh.is_leaving(node.node_id))
        node.state = "ready"
        await mesh.until(mesh.view.ready)
        assert not mesh.mesh.is_leaving(node.node_id)
        assert await mesh.drive(mesh.generate()) == expected()
        assert mesh.generator.totals.reroutes == 0
