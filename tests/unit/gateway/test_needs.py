"""Requests go only where they can be served: abilities of last hops, context lengths of all, priorities."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway.errors import AdmissionRefused, NotReady
from gateway.needs import Needs, needs_of
from gateway.registry import longest_context
from shared.errors import HandshakeRefused
from shared.layers import LayerRange
from shared.messages import NodeInfo, SamplingParams
from tests.support.memory_mesh import PROMPT, ScriptedMesh, expected, idle, scripted_mesh
from tests.support.scripted_node import Crash, nth

OLD = {"sampling": ("temperature", "top_p", "seed"), "features": ()}
"""What a node of an earlier version says of itself."""
PENALIZED = SamplingParams(temperature=0.7, seed=2, frequency_penalty=0.5, prompt_len=5)


def node(node_id: str = "a", layers: str = "0:2", **fields: object) -> NodeInfo:
    """A ready node of a model of two layers."""
    info = NodeInfo(node=node_id, model="m", layers=LayerRange.parse(layers), num_layers=2, state="ready")
    return replace(info, **fields)  # type: ignore[arg-type]


def test_only_a_last_hop_is_asked_for_abilities() -> None:
    """And every hop for room."""
    needs = needs_of([PENALIZED, SamplingParams(seed=4)], context_len=10, features=("score",))
    assert needs.sampling == {"temperature", "seed", "frequency_penalty", "prompt_len"}
    assert needs.unmet(node(layers="0:1")) == []
    assert needs.unmet(node(sampling=("temperature", "seed"))) == ["frequency_penalty", "prompt_len", "score"]
    assert not needs.are_met_by(node(layers="0:1", context_len=9))
    assert needs.are_met_by(node(layers="0:1", context_len=10))
    assert Needs(context_len=10).are_met_by(node())


def test_the_longest_context_is_that_of_the_best_route() -> None:
    """Its shortest node decides; nodes that do not say take any."""

    def longest(*nodes: NodeInfo) -> int:
        return longest_context(nodes, model="m", num_layers=2)

    assert longest() == 0
    assert longest(node()) == 0
    assert longest(node(context_len=8)) == 8
    assert longest(node("a", "0:1", context_len=8), node("b", "1:2", context_len=16)) == 8
    assert longest(node("a", "0:1", context_len=8), node("b", "1:2")) == 8
    assert longest(node("a", context_len=8), node("b", context_len=16)) == 16
    assert longest(node("a", context_len=8), node("b")) == 0
    assert longest(node("a", "0:1", context_len=8)) == 0


async def refused(mesh: ScriptedMesh, code: str, **fields: object) -> AdmissionRefused:
    """How a request is refused, without a step to any node."""
    with pytest.raises(AdmissionRefused) as refusal:
        await mesh.drive(mesh.generate(**fields))
    assert refusal.value.code == code
    assert refusal.value.retry_after_s is None
    assert not any(node.seen for node in mesh.nodes)
    mesh.assert_nothing_left()
    return refusal.value


async def test_what_no_last_hop_does_is_refused_by_name() -> None:
    """Never ignored, and before anything runs."""
    async with scripted_mesh(node_options={2: OLD}) as mesh:
        error = await refused(mesh, "sampling_unsupported", sampling=PENALIZED)
        assert error.fields["unsupported"] == ["frequency_penalty", "prompt_len"]
        assert "frequency_penalty, prompt_len" in error.message
        await refused(mesh, "sampling_unsupported", prompt_logprobs=0)
        assert await mesh.drive(mesh.generate()) == expected()


async def test_the_route_leads_to_a_last_hop_that_can() -> None:
    """An old one with the same layers is passed over, and takes no hop over either."""
    async with scripted_mesh(["0:6", "0:6", "0:6"], node_options={0: OLD, 1: OLD}) as mesh:
        mesh.nodes[2].script = nth(4, Crash(back_after_s=3.0))
        assert await mesh.drive(mesh.generate(sampling=PENALIZED)) == expected(sampling=PENALIZED)
        assert not mesh.nodes[0].seen
        assert not mesh.nodes[1].seen
        assert await mesh.drive(mesh.generate()) == expected()
        assert mesh.nodes[0].seen


async def test_a_node_that_comes_back_older_is_not_taken_back() -> None:
    """Its replica, which is newer, takes over."""
    async with scripted_mesh(["0:6", "0:6"]) as mesh:
        async with mesh.generator.generation(mesh.request(sampling=PENALIZED)) as stream:
            tokens = [(await mesh.drive(anext(stream))).id for _ in range(3)]
            mesh.nodes[0].sampling = ("temperature", "seed")
            mesh.nodes[0].restart()
            tokens += [(await mesh.drive(anext(stream))).id for _ in range(5)]
        assert tokens == expected(sampling=PENALIZED)
        assert mesh.nodes[1].seen
        await idle()
        mesh.assert_nothing_left()


async def test_a_context_that_no_route_takes_is_refused_with_the_numbers() -> None:
    """Rather than failing in the middle of an answer."""
    async with scripted_mesh(node_options={1: {"context_len": 12}, 2: {"context_len": 40}}) as mesh:
        assert mesh.generator.context_len() == 12
        error = await refused(mesh, "context_too_long", max_tokens=8)
        assert (error.fields["tokens"], error.fields["limit"]) == (len(PROMPT) + 8, 12)
        assert "13 tokens" in error.message
        assert await mesh.drive(mesh.generate(7)) == expected(7)
        await idle()
        mesh.assert_nothing_left()


async def test_a_request_waits_for_a_node_that_can_and_holds_nobody_back() -> None:
    """The mesh had no route at all when it came; an old node makes one for others only."""
    async with scripted_mesh(["0:6"], node_options={0: OLD}, wait_ready=False, route_wait_s=5.0) as mesh:
        waiting = asyncio.ensure_future(mesh.generate(sampling=PENALIZED))
        other = asyncio.ensure_future(mesh.generate())
        await asyncio.sleep(0)
        assert await mesh.drive(other) == expected()
        with pytest.raises(NotReady, match=r"a \(0:6\) does not support frequency_penalty, prompt_len"):
            await mesh.drive(waiting)
        mesh.assert_nothing_left()


async def test_lower_priorities_start_first_and_equal_ones_in_order() -> None:
    """One place, five callers."""
    async with scripted_mesh(["0:6"], node_options={0: {"sessions_max": 1}}) as mesh:
        order: list[tuple[int, int]] = []

        async def wait(number: int, priority: int) -> None:
            async with mesh.generator.generation(mesh.request(1, priority=priority)) as tokens:
                order.append((priority, number))
                await anext(tokens)

        async with mesh.generator.generation(mesh.request(1)):
            waiting = [asyncio.create_task(wait(number, priority)) for number, priority in enumerate([5, 0, 5, -1, 0])]
            await idle()
        await mesh.drive(asyncio.gather(*waiting))
        assert order == [(-1, 3), (0, 1), (0, 4), (5, 0), (5, 2)]


async def test_a_node_that_refuses_us_is_named_with_its_reason() -> None:
    """Before it has said its name, and after."""
    async with scripted_mesh(["0:3", "3:6"], wait_ready=False) as mesh:
        refusal = HandshakeRefused("unauthorized", "the mesh token is missing or wrong")
        mesh.nodes[1].refusal = refusal
        await mesh.until(lambda: mesh.mesh.links[1].last_error is refusal)
        assert mesh.view.missing_route() == (
            "layers 3:6 of 6 are not covered by ready nodes; "
            "ws://b refused the link: unauthorized (the mesh token is missing or wrong)"
        )
        mesh.nodes[1].refusal = None
        await mesh.until(mesh.view.ready)
        mesh.nodes[1].refusal = HandshakeRefused("model_mismatch", "the model here is x, not y")
        mesh.nodes[1].restart()
        await mesh.until(lambda: mesh.mesh.links[1].last_error is mesh.nodes[1].refusal)
        reason = mesh.view.missing_route()
        assert reason is not None
        assert reason.endswith("b (ws://b) refused the link: model_mismatch (the model here is x, not y)")
