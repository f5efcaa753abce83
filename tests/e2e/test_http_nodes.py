"""Nodes that speak HTTP in a route beside those that speak WebSocket: the same tokens, whatever the old ones lack."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from gateway.dialler import dialling
from gateway.errors import GenerationFailed
from gateway.generation import GenerationSettings, Generator, create_generator
from gateway.generation_request import GenerationRequest
from gateway.mesh import Mesh, create_mesh
from gateway.mesh_view import MeshView
from shared.clock import SystemClock
from shared.mesh_access import MeshAccess
from shared.messages import SamplingParams
from tests.support.fake_model import expected_tokens
from tests.support.fake_node import FINGERPRINT, running_fake_node
from tests.support.fake_runner import ids_of
from tests.support.http_node import HttpNode, running_http_node

NUM_LAYERS = 6
PROMPT = tuple(range(40, 70))
SEEDED = SamplingParams(temperature=0.8, seed=7)
COUNT = 20
EXPECTED = expected_tokens(PROMPT, COUNT, num_layers=NUM_LAYERS, sampling=SEEDED)


@asynccontextmanager
async def core(
    http: dict[str, dict[str, Any]], **settings: Any
) -> AsyncIterator[tuple[Generator, Mesh, list[HttpNode]]]:
    """A gateway core over three nodes; those whose range is named speak HTTP, with these fields."""
    async with AsyncExitStack() as stack:
        urls, nodes = [], []
        for cut in ("0:2", "2:4", "4:6"):
            if cut in http:
                nodes.append(stack.enter_context(running_http_node(cut, NUM_LAYERS, FINGERPRINT, **http[cut])))
                urls.append(nodes[-1].url)
            else:
                urls.append((await stack.enter_async_context(running_fake_node(cut, num_layers=NUM_LAYERS))).url)
        mesh = create_mesh(urls, gateway_id="gateway", model=FINGERPRINT, dial=dialling(MeshAccess()))
        values = GenerationSettings(prefill_chunk_tokens=8, **settings)
        generator = create_generator(
            mesh, model=FINGERPRINT, num_layers=NUM_LAYERS, encode_text=ids_of, settings=values
        )
        running = asyncio.create_task(mesh.run())
        view = MeshView(mesh, generator, clock=SystemClock())
        try:
            async with asyncio.timeout(20):
                while not view.ready():
                    await asyncio.sleep(0.01)
            yield generator, mesh, nodes
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def generate(generator: Generator, interfere: Callable[[int], None] = lambda _: None) -> list[int]:
    """One seeded answer; `interfere` is called after each token."""
    request = GenerationRequest(
        prompt_ids=PROMPT, choices=(SEEDED,), max_tokens=COUNT, eos_ids=frozenset(), request_id="r"
    )
    tokens: list[int] = []
    async with generator.generation(request) as stream:
        async for token in stream:
            tokens.append(token.id)
            interfere(len(tokens))
    return tokens


@pytest.mark.parametrize("cut", ["0:2", "2:4", "4:6"])
async def test_an_http_node_anywhere_in_the_route(cut: str) -> None:
    """It is given a prefill in chunks and then decodes, as the others are."""
    async with core({cut: {}}) as (generator, _, (node,)):
        assert await generate(generator) == EXPECTED
        assert node.served == {"prefill": 1, "decode": 3 + COUNT - 1}


async def test_a_route_of_http_nodes_alone() -> None:
    """No WebSocket anywhere."""
    async with core({"0:2": {}, "2:4": {}, "4:6": {"json_tail": True}}) as (generator, _, _):
        assert await generate(generator) == EXPECTED


async def test_a_lost_session_is_rebuilt_at_that_hop_alone() -> None:
    """409 `cache_miss` is the miss that it is elsewhere."""
    async with core({"2:4": {}, "4:6": {}}) as (generator, _, (middle, last)):
        assert await generate(generator, lambda count: middle.sessions.clear() if count == 7 else None) == EXPECTED
        assert (middle.served["prefill"], last.served["prefill"]) == (2, 1)


@pytest.mark.parametrize("cut", ["0:2", "2:4", "4:6"])
async def test_a_node_without_a_cache_is_asked_statelessly(cut: str) -> None:
    """Without any of the headers, and with everything each time."""
    async with core({cut: {"knows_cache": False}}) as (generator, _, (node,)):
        assert await generate(generator) == EXPECTED
        assert set(node.served) == {"stateless"}


async def test_an_old_tail_that_answers_with_text_makes_every_step_a_prefill() -> None:
    """It says nothing of token ids; the text is read again."""
    async with core({"4:6": {"text_tail": True, "json_tail": True, "info": {"token_ids": False}}}) as (
        generator,
        _,
        nodes,
    ):
        assert await generate(generator) == EXPECTED
        assert nodes[0].served["prefill"] == COUNT


@pytest.mark.parametrize(
    "answer", [(500, b"<html>"), (503, b"{}"), (502, b'{"error": "bad gateway!", "message": "later"}')]
)
async def test_one_failed_answer_is_asked_again(answer: tuple[int, bytes]) -> None:
    """As any step that a node could not serve."""
    async with core({"2:4": {}}) as (generator, _, (node,)):
        assert await generate(generator, lambda count: node.failing.append(answer) if count == 5 else None) == EXPECTED


async def test_an_answer_that_says_nothing_is_asked_again() -> None:
    """200 with neither a frame nor a token: the step is at fault, the link is not."""
    async with core({"2:4": {}}) as (generator, mesh, (node,)):
        answer = (200, b"{}")
        assert await generate(generator, lambda count: node.failing.append(answer) if count == 5 else None) == EXPECTED
        assert mesh.links[1].connects == 1


async def test_a_node_that_is_gone_ends_the_answer_with_an_error_in_time() -> None:
    """Nothing listens there any more."""
    async with core({"2:4": {}}, failover_timeout_s=1.0) as (generator, _, (node,)):

        def die(count: int) -> None:
            if count == 5:
                node.failing += [(200, b"")] * 1000
                node.info["model"] = "another"

        with pytest.raises(GenerationFailed):
            async with asyncio.timeout(20):
                await generate(generator, die)
