"""The gateway core over real links and real nodes, whose model is made of hashes.

What unit tests show with scripted nodes on a fake clock holds with WebSockets, the real session store and
the machine's time as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from gateway.generation import GenerationSettings, Generator, create_generator
from gateway.generation_request import GenerationRequest
from gateway.mesh import Mesh, create_mesh
from gateway.mesh_view import MeshView
from shared.clock import SystemClock
from shared.messages import SamplingParams
from tests.support.fake_model import expected_tokens
from tests.support.fake_node import FINGERPRINT, FakeNode, running_fake_node
from tests.support.fake_runner import ids_of

NUM_LAYERS = 6
CUTS = ("0:2", "2:4", "4:6")
PROMPT = tuple(range(40, 70))
SEEDED = SamplingParams(temperature=0.8, seed=7)
WAIT_S = 10.0


@dataclass
class Core:
    """A gateway core and its nodes."""

    nodes: list[FakeNode]
    mesh: Mesh
    generator: Generator
    view: MeshView

    async def generate(self, max_tokens: int = 24, interfere: Callable[[int], None] | None = None) -> list[int]:
        """All tokens of one generation; `interfere` is called after each with how many there are."""
        request = GenerationRequest(
            prompt_ids=PROMPT, choices=(SEEDED,), max_tokens=max_tokens, eos_ids=frozenset(), request_id="r"
        )
        tokens: list[int] = []
        async with self.generator.generation(request) as stream:
            async for token in stream:
                tokens.append(token.id)
                if interfere:
                    interfere(len(tokens))
        return tokens

    def prefills(self) -> list[int]:
        """Prefills each node has been given."""
        return [sum(step.cache == "prefill" for step in node.runner.seen) for node in self.nodes]

    def sessions(self) -> list[int]:
        """Sessions each node holds."""
        stores = [held.store for node in self.nodes if (held := node.service.keeper.held)]
        return [len(store._listed) if store else 0 for store in stores]


def expected(max_tokens: int = 24) -> list[int]:
    """What any mesh must generate."""
    return expected_tokens(PROMPT, max_tokens, num_layers=NUM_LAYERS, sampling=SEEDED)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running_core(**settings: float) -> AsyncIterator[Core]:
    """Three nodes in this process, and the core that is linked to them."""
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(running_fake_node(cut, num_layers=NUM_LAYERS)) for cut in CUTS]
        mesh = create_mesh([node.url for node in nodes], gateway_id="gateway", model=FINGERPRINT, token=None)
        values = GenerationSettings(prefill_chunk_tokens=8, **settings)  # type: ignore[arg-type]
        generator = create_generator(
            mesh, model=FINGERPRINT, num_layers=NUM_LAYERS, encode_text=ids_of, settings=values
        )
        running = asyncio.create_task(mesh.run())
        view = MeshView(mesh, generator, clock=SystemClock())
        try:
            await until(view.ready)
            yield Core(nodes, mesh, generator, view)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_tokens_over_real_links() -> None:
    """One prefill per node, the reference's tokens, and no session left."""
    async with running_core() as core:
        assert await core.generate() == expected()
        await until(lambda: core.sessions() == [0, 0, 0])
        assert core.prefills() == [1, 1, 1]


@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_a_lost_cache_is_rebuilt_at_its_hop_alone(hop: int) -> None:
    """Twice in one generation."""
    async with running_core() as core:

        def interfere(count: int) -> None:
            if count in {5, 15}:
                core.nodes[hop].forget_all()

        tokens = await core.generate(interfere=interfere)
        assert tokens == expected()
        assert core.prefills() == [3 if index == hop else 1 for index in range(3)]
        await core.view.refresh()
        figures = core.view.snapshot()["nodes"][hop]
        assert figures["misses"] == {"unknown": 2}
        assert figures["link"]["received_frames"]["cache_miss"] == 2


@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_a_node_that_crashes_and_comes_back(hop: int) -> None:
    """On the same port, with nothing in its cache."""
    async with running_core() as core, AsyncExitStack() as stack:
        crashed = core.nodes[hop]
        revived: list[FakeNode] = []

        async def crash() -> None:
            await crashed.crash()
            node = running_fake_node(CUTS[hop], num_layers=NUM_LAYERS, port=crashed.address.port)
            revived.append(await stack.enter_async_context(node))

        crashing: list[asyncio.Task[None]] = []

        def interfere(count: int) -> None:
            if count == 7:
                crashing.append(asyncio.create_task(crash()))

        assert await core.generate(300, interfere) == expected(300)
        await crashing[0]
        others = [node for index, node in enumerate(core.nodes) if index != hop]
        assert all(sum(step.cache == "prefill" for step in node.runner.seen) == 1 for node in others)
        assert sum(step.cache == "prefill" for step in revived[0].runner.seen) == 1


async def test_leaving_frees_every_node_at_once() -> None:
    """The caller is cancelled in mid-stream, and a node in mid-step."""
    async with running_core() as core:
        core.nodes[1].runner.step_s = 0.2
        asking = asyncio.create_task(core.generate())
        await until(lambda: len(core.nodes[1].runner.seen) >= 6)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(1.0):
            await until(lambda: core.sessions() == [0, 0, 0])
        served = len(core.nodes[1].runner.seen)
        await asyncio.sleep(0.3)
        assert len(core.nodes[1].runner.seen) == served


async def test_choices_of_one_request_over_real_links() -> None:
    """More than the nodes hold at once; each is what it would be alone, and no session is left."""
    choices = tuple(SamplingParams(temperature=0.8, seed=seed) for seed in range(10))
    request = GenerationRequest(prompt_ids=PROMPT, choices=choices, max_tokens=12, eos_ids=frozenset(), request_id="r")
    async with running_core() as core:
        answers: list[list[int]] = [[] for _ in choices]
        async with core.generator.generation(request) as stream:
            async for token in stream:
                answers[token.choice].append(token.id)
        alone = [expected_tokens(PROMPT, 12, num_layers=NUM_LAYERS, sampling=choice) for choice in choices]
        assert answers == alone
        await until(lambda: core.sessions() == [0, 0, 0])


async def test_many_generations_share_the_nodes() -> None:
    """More than there are places: some wait, all are right."""
    async with running_core() as core:
        answers = await asyncio.gather(*(core.generate(16) for _ in range(20)))
        assert answers == [expected(16)] * 20
        await until(lambda: core.sessions() == [0, 0, 0])
