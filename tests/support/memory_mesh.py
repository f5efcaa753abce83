"""A gateway core over scripted nodes, on a clock that moves only when nothing else can happen."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, TypeVar

from gateway.choice import ChoiceStream
from gateway.generation import GenerationSettings, Generator, create_generator
from gateway.generation_request import GenerationRequest, Token
from gateway.mesh import Mesh, create_mesh
from gateway.mesh_view import MeshView
from gateway.open_link import Dial
from shared.layers import LayerRange
from shared.messages import SamplingParams
from tests.support.fake_clock import FakeClock
from tests.support.fake_model import expected_answer, expected_tokens
from tests.support.scripted_node import MODEL, VOCAB_SIZE, ScriptedNode, create_dial, ids_of

NUM_LAYERS = 6
CUTS = ("0:2", "2:4", "4:6")
PROMPT = (11, 12, 13, 14, 15)
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.7, seed=42)
FAKE_TIME_MAX_S = 2_000.0
"""What a test may wait for on the fake clock before it counts as hanging."""

T = TypeVar("T")


def seeded(*seeds: int, **fields: Any) -> tuple[SamplingParams, ...]:
    """A choice for each seed."""
    return tuple(SamplingParams(temperature=0.7, seed=seed, **fields) for seed in seeds)


class EventClock(FakeClock):
    """Moves from one sleeper to the next."""

    def wake_next(self) -> None:
        """Move to the moment of the next sleeper, and wake those of that moment."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        assert self._sleepers, "nothing runs and nothing waits for time: a deadlock"
        self._now_s = max(self._now_s, self._sleepers[0][0])
        while self._sleepers and self._sleepers[0][0] <= self._now_s:
            _, _, waiter = heapq.heappop(self._sleepers)
            if not waiter.done():
                waiter.set_result(None)


async def idle() -> None:
    """Let every task run until none can."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    while ready:
        await asyncio.sleep(0)


@dataclass
class ScriptedMesh:
    """What a test works with."""

    clock: EventClock
    nodes: list[ScriptedNode]
    mesh: Mesh
    generator: Generator
    view: MeshView

    async def drive(self, awaitable: Awaitable[T]) -> T:
        """Await something, moving the clock to the next sleeper whenever nothing else can happen."""
        task = asyncio.ensure_future(awaitable)
        limit = self.clock.monotonic() + FAKE_TIME_MAX_S
        try:
            while True:
                await idle()
                if task.done():
                    return task.result()
                await self.tick()
                assert self.clock.monotonic() < limit, "nothing happened for too long"
        finally:
            task.cancel()

    async def tick(self) -> None:
        """Move the clock to the next sleeper."""
        self.clock.wake_next()
        await idle()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Move the clock until the condition is true."""
        limit = self.clock.monotonic() + FAKE_TIME_MAX_S
        await idle()
        while not condition():
            await self.tick()
            assert self.clock.monotonic() < limit, "the condition never came true"

    def request(self, max_tokens: int = 8, **fields: Any) -> GenerationRequest:
        """A generation."""
        choices = fields.pop("choices", (fields.pop("sampling", GREEDY),))
        values = {"prompt_ids": PROMPT, "choices": choices, "eos_ids": frozenset(), "request_id": "r", **fields}
        return GenerationRequest(max_tokens=max_tokens, **values)

    async def generate(self, max_tokens: int = 8, **fields: Any) -> list[int]:
        """All tokens of one generation."""
        async with self.generator.generation(self.request(max_tokens, **fields)) as tokens:
            return [token.id async for token in tokens]

    async def generate_with_figures(self, max_tokens: int = 8, **fields: Any) -> tuple[list[int], ChoiceStream]:
        """All tokens of one generation, and its stream with the figures."""
        async with self.generator.generation(self.request(max_tokens, **fields)) as tokens:
            return [token.id async for token in tokens], tokens

    async def generate_choices(self, max_tokens: int = 8, **fields: Any) -> list[list[int]]:
        """All tokens of each choice of one request."""
        request = self.request(max_tokens, **fields)
        answers: list[list[int]] = [[] for _ in request.choices]
        async with self.generator.generation(request) as tokens:
            async for token in tokens:
                answers[token.choice].append(token.id)
        return answers

    def prefills(self) -> list[int]:
        """Prefills served by each node."""
        return [node.steps["prefill"] for node in self.nodes]

    def assert_nothing_left(self) -> None:
        """No session on any node, no reservation, no journal, no wait; no step applied twice."""
        for node in self.nodes:
            assert node.sessions == {}, f"{node.node_id} still holds {node.sessions}"
            assert node.faults == [], f"{node.node_id} was asked what it must not be asked"
            assert all(times == 1 for times in node.applied.values()), f"{node.node_id} applied a step twice"
        assert self.generator.admission.active == 0
        assert self.generator.admission.queued == 0
        assert self.generator.admission.load().total() == 0
        assert self.generator.journal.nbytes == 0
        assert self.generator.running_figures() == []
        assert all(link.waiting == 0 for link in self.mesh.links)


def expected(max_tokens: int = 8, **fields: Any) -> list[int]:
    """What a mesh of scripted nodes must generate."""
    values = {"sampling": GREEDY, "eos_ids": frozenset[int](), "prompt_ids": PROMPT, **fields}
    return expected_tokens(values.pop("prompt_ids"), max_tokens, num_layers=NUM_LAYERS, vocab_size=VOCAB_SIZE, **values)


def expected_tokens_of(max_tokens: int = 8, **fields: Any) -> list[Token]:
    """As `expected`, with what the sampling asks for beside the ids; of choice 0."""
    values = {"sampling": GREEDY, "prompt_ids": PROMPT, **fields}
    answer = expected_answer(
        values.pop("prompt_ids"), max_tokens, num_layers=NUM_LAYERS, vocab_size=VOCAB_SIZE, **values
    )
    return [Token(token_id, logprobs=logprobs) for token_id, logprobs in answer]


def create_node(clock: FakeClock, node_id: str, layers: str, **options: Any) -> ScriptedNode:
    """A node of the test's model."""
    return ScriptedNode(node_id, LayerRange.parse(layers), NUM_LAYERS, clock, **options)


def create_gateway(
    clock: FakeClock,
    nodes: Sequence[ScriptedNode],
    *,
    gateway_id: str = "gateway",
    dial: Dial | None = None,
    **settings: Any,
) -> tuple[Mesh, Generator]:
    """The gateway's core over these nodes; whoever makes it runs the mesh.

    Args:
        clock: Time.
        nodes: All that are configured.
        gateway_id: Its name; sessions of the default one are called ``s1``, ``s2`` and so on.
        dial: Opens links; straight to the nodes by default.
        settings: For `GenerationSettings`.
    """
    mesh = create_mesh(
        [node.url for node in nodes],
        gateway_id=gateway_id,
        model=MODEL,
        token=None,
        dial=dial or create_dial(nodes),
        clock=clock,
        rng=Random(0),
    )
    numbers = count(1)
    prefix = "s" if gateway_id == "gateway" else f"{gateway_id}-s"
    generator = create_generator(
        mesh,
        model=MODEL,
        num_layers=NUM_LAYERS,
        encode_text=ids_of,
        settings=GenerationSettings(**{"prefill_chunk_tokens": 4, "failover_timeout_s": 30.0, **settings}),
        clock=clock,
        mint_session_id=lambda: f"{prefix}{next(numbers)}",
        vocab_size=VOCAB_SIZE,
    )
    return mesh, generator


@asynccontextmanager
async def scripted_mesh(
    cuts: Sequence[str] = CUTS,
    *,
    node_options: dict[int, dict[str, Any]] | None = None,
    wait_ready: bool = True,
    **settings: Any,
) -> AsyncIterator[ScriptedMesh]:
    """A running mesh of nodes ``a``, ``b``, ``c`` and so on, one for each of these ranges, and a generator over it.

    Args:
        cuts: Ranges; the same one several times makes replicas.
        node_options: For `ScriptedNode`, by position.
        wait_ready: Whether to connect all nodes before the block is entered.
        settings: For `GenerationSettings`.
    """
    clock = EventClock()
    nodes = [
        create_node(clock, layers=layers, **{"node_id": "abcdefgh"[index], **(node_options or {}).get(index, {})})
        for index, layers in enumerate(cuts)
    ]
    mesh, generator = create_gateway(clock, nodes, **settings)
    running = asyncio.create_task(mesh.run())
    scripted = ScriptedMesh(clock, nodes, mesh, generator, MeshView(mesh, generator, clock=clock))
    try:
        if wait_ready:
            await scripted.until(lambda: all(link.is_open for link in mesh.links))
        yield scripted
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for node in nodes:
            await node.close()
