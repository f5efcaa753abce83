"""Four kinds of model, cut at every layer, through real nodes and links: always the tokens of one process.

Full attention (Qwen2, Llama), sliding windows (Gemma 3) and linear attention (Qwen3-Next), with random
weights, in one process so that every cut is affordable.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gateway.generation import GenerationSettings, Generator, create_generator
from gateway.generation_request import GenerationRequest
from gateway.mesh import create_mesh
from shard.assignment import Progress
from shard.loader import load_stage
from shard.settings import KvLimits
from shard.stage_runner import StageRunner
from shared.layers import LayerRange
from shared.messages import SamplingParams
from tests.conftest import TinyModels
from tests.support.architectures import tiny_config
from tests.support.live_node import LiveNode, running_node
from tests.support.parity_case import build_whole
from tests.support.reference import Reference
from tests.support.tiny_models import KINDS, NUM_LAYERS, SLIDING_WINDOW

CONTENT = "Wie geht es dir? 你好!"
MAX_TOKENS = 2 * SLIDING_WINDOW + 4
CHUNK_TOKENS = 7
"""Smaller than the window, so that the prompt crosses its edge in several chunks."""
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
FINGERPRINT = "tiny"
READY_WITHIN_S = 30.0


async def generate(
    generator: Generator, prompt_ids: list[int], sampling: SamplingParams, *, forget: LiveNode | None = None
) -> list[int]:
    """The tokens of one generation; `forget` loses all sessions of that node at every fifth token."""
    request = GenerationRequest(
        prompt_ids=tuple(prompt_ids), choices=(sampling,), max_tokens=MAX_TOKENS, eos_ids=frozenset(), request_id="r"
    )
    tokens: list[int] = []
    async with generator.generation(request) as stream:
        async for token in stream:
            tokens.append(token.id)
            if forget and len(tokens) % 5 == 0:
                assert forget.forget_all() == 1
    return tokens


@asynccontextmanager
async def running_mesh(
    model: Path, layers: list[LayerRange], *, cached: bool
) -> AsyncIterator[tuple[Generator, list[LiveNode]]]:
    """A node per range, and the gateway core linked to them."""

    def loader_of(part: LayerRange):  # noqa: ANN202 - the type of a closure that running_node checks
        def load(_: Progress) -> StageRunner:
            torch.set_num_threads(1)
            return StageRunner(load_stage(model, part, device="cpu", dtype="float32"))

        return load

    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(
                running_node(
                    loader_of(part),
                    str(part),
                    num_layers=NUM_LAYERS,
                    fingerprint=FINGERPRINT,
                    limits=KvLimits(enabled=cached, bytes_max=1 << 26),
                )
            )
            for part in layers
        ]
        mesh = create_mesh([node.url for node in nodes], gateway_id="gateway", model=FINGERPRINT, token=None)
        generator = create_generator(
            mesh,
            model=FINGERPRINT,
            num_layers=NUM_LAYERS,
            encode_text=lambda _: [],
            settings=GenerationSettings(prefill_chunk_tokens=CHUNK_TOKENS),
        )
        running = asyncio.create_task(mesh.run())
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                while generator.missing_route() is not None:
                    await asyncio.sleep(0.01)
            yield generator, nodes
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@dataclass(frozen=True)
class Case:
    """A prompt for a kind of model, and the greedy answer of the whole model in this process."""

    prompt_ids: list[int]
    expected: list[int]


@pytest.fixture(scope="module")
def case(tiny_model: TinyModels) -> Callable[[str], Case]:
    """`case("qwen2")` is that kind's, computed once."""

    @cache
    def get(kind: str) -> Case:
        reference = Reference(tiny_model(kind))
        prompt_ids = reference.prompt_ids(CONTENT)
        return Case(prompt_ids, reference.greedy_ids(prompt_ids, MAX_TOKENS))

    return get


@pytest.mark.parametrize("cut", range(1, NUM_LAYERS))
@pytest.mark.parametrize("kind", KINDS)
async def test_every_cut_gives_the_tokens_of_one_process(
    tiny_model: TinyModels, case: Callable[[str], Case], kind: str, cut: int
) -> None:
    """Greedy: cached = stateless = transformers. Seeded: cached = stateless = after replays on either node."""
    prompt_ids, expected = case(kind).prompt_ids, case(kind).expected
    layers = [LayerRange(0, cut), LayerRange(cut, NUM_LAYERS)]
    async with running_mesh(tiny_model(kind), layers, cached=True) as (generator, nodes):
        assert await generate(generator, prompt_ids, GREEDY) == expected
        sampled = await generate(generator, prompt_ids, SEEDED)
        assert sampled != expected
        for node in nodes:
            assert await generate(generator, prompt_ids, SEEDED, forget=node) == sampled
    async with running_mesh(tiny_model(kind), layers, cached=False) as (generator, _):
        assert await generate(generator, prompt_ids, GREEDY) == expected
        assert await generate(generator, prompt_ids, SEEDED) == sampled


async def test_a_model_that_needs_ids_on_every_hop(tmp_path: Path) -> None:
    """Gemma 3n: its later layers look at the ids again, with every step, also after a replay and without a cache."""
    tiny_config("gemma3n_text").save_pretrained(tmp_path)
    whole: Any = build_whole(tmp_path)
    prompt_ids = list(range(5, 20))
    ids = whole.generate(torch.tensor([prompt_ids]), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None)
    expected = ids[0, len(prompt_ids) :].tolist()
    layers = [LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, NUM_LAYERS)]
    async with running_mesh(tmp_path, layers, cached=True) as (generator, nodes):
        assert await generate(generator, prompt_ids, GREEDY) == expected
        for node in nodes:
            assert await generate(generator, prompt_ids, GREEDY, forget=node) == expected
    async with running_mesh(tmp_path, layers, cached=False) as (generator, _):
        assert await generate(generator, prompt_ids, GREEDY) == expected


async def test_single_layer_nodes(tiny_model: TinyModels, case: Callable[[str], Case]) -> None:
    """Six nodes of one layer each, some of them holding nothing but linear attention."""
    prompt_ids, expected = case("qwen3_next").prompt_ids, case("qwen3_next").expected
    layers = [LayerRange(index, index + 1) for index in range(NUM_LAYERS)]
    async with running_mesh(tiny_model("qwen3_next"), layers, cached=True) as (generator, _):
        assert await generate(generator, prompt_ids, GREEDY) == expected
