"""Random faults at random moments, one seed per schedule: tokens stay right and nothing is left over.

The gateway's whole control logic runs over scripted nodes on a fake clock, so a seed replays its schedule
exactly: ``pytest tests/simulation -k "seed17"``, or call `run_schedule(17)`.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import structlog

from gateway.choice import ChoiceStream
from gateway.errors import GenerationFailed
from gateway.generation_request import GenerationRequest, Token
from shared.messages import FEATURES, Pooling, SamplingParams, Step
from tests.support.fake_model import expected_embedding, expected_scores
from tests.support.memory_mesh import NUM_LAYERS, ScriptedMesh, expected_tokens_of, idle, scripted_mesh
from tests.support.scripted_node import Crash, Cut, Drop, Fail, Fate, Late, Miss, Slow

SCHEDULES = 200
REQUESTS = 3
FAULT_RATE = 0.06
CUTS = ("0:2", "2:4", "4:6", "0:2", "2:4", "4:6")
"""Each range twice, so that a hop may move."""


def random_fate(rng: Random) -> Fate:
    """One of all faults a node can have."""
    fates: list[Fate] = [
        Miss(rng.choice(["unknown", "expired", "evicted", "past_len_mismatch"])),
        Miss("disabled"),
        Fail("internal_error"),
        Fail("queue_full"),
        Slow(rng.uniform(0.1, 8.0)),
        Late(rng.uniform(0.1, 8.0)),
        Drop(applied=rng.random() < 0.5),
        Cut(applied=rng.random() < 0.5),
        Crash(back_after_s=rng.uniform(0.0, 5.0)),
    ]
    return rng.choice(fates)


def random_request(mesh: ScriptedMesh, rng: Random) -> GenerationRequest:
    """One of all things that can be asked: up to four choices, a history, log-probabilities, a scored prompt."""
    prompt_ids = tuple(rng.randrange(1000) for _ in range(rng.randint(1, 14)))
    fields = {
        "temperature": rng.choice([0.0, 0.7]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.5]),
        "logprobs": rng.choice([None, None, 0, 2]),
    }
    seeds = [rng.randrange(100) for _ in range(rng.choice([1, 1, 2, 3, 4]))]
    prompt_logprobs = rng.choice([None, None, 0, 2])
    return mesh.request(
        rng.randint(1 if prompt_logprobs is None else 0, 12 if len(seeds) == 1 else 6),
        prompt_ids=prompt_ids,
        choices=tuple(SamplingParams(seed=seed, **fields) for seed in seeds),
        prompt_logprobs=prompt_logprobs,
        priority=rng.choice([0, 0, 1]),
    )


@dataclass
class Reading:
    """One request being read: what came, and when the reader needs no more.

    Args:
        request: What was asked.
        finish_after: Tokens of each choice after which the reader finishes it.
        leave_after: Tokens of all choices after which the reader leaves.
    """

    request: GenerationRequest
    finish_after: list[int]
    leave_after: int
    tokens: list[list[Token]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)

    def take(self, stream: ChoiceStream, token: Token) -> bool:
        """Take in a token; returns whether to go on."""
        self.order.append(token.choice)
        tokens = self.tokens[token.choice]
        tokens.append(replace(token, choice=0))
        assert len(tokens) <= self.finish_after[token.choice], "a finished choice went on"
        if len(tokens) == self.finish_after[token.choice]:
            stream.finish(token.choice)
        return len(self.order) != self.leave_after

    def check(self, stream: ChoiceStream, *, is_whole: bool) -> None:
        """Each choice is what it would be alone, first tokens came in order, and the prompt is scored."""
        request = self.request
        for sampling, tokens, last in zip(request.choices, self.tokens, self.finish_after, strict=True):
            whole = expected_tokens_of(request.max_tokens, prompt_ids=request.prompt_ids, sampling=sampling)[:last]
            assert tokens == (whole if is_whole else whole[: len(tokens)])
        firsts = [self.order.index(choice) for choice in sorted(set(self.order))]
        assert firsts == sorted(firsts)
        assert sorted(set(self.order)) == list(range(len(set(self.order))))
        if request.prompt_logprobs is not None and (is_whole or self.order):
            scores = expected_scores(request.prompt_ids, request.prompt_logprobs, num_layers=NUM_LAYERS)
            assert stream.prompt_scores.tokens == scores


async def generate(mesh: ScriptedMesh, rng: Random, outcomes: list[str]) -> None:
    """One request, which may leave early or finish choices early."""
    request = random_request(mesh, rng)
    finish_after = [rng.choice([99, 99, rng.randint(1, 4)]) for _ in request.choices]
    reading = Reading(request, finish_after, rng.choice([-1, -1, rng.randint(1, 12)]), [[] for _ in request.choices])
    await mesh.clock.sleep(rng.uniform(0, 2))
    is_whole = True
    try:
        async with mesh.generator.generation(request) as stream:
            async for token in stream:
                if not reading.take(stream, token):
                    is_whole = False
                    break
                await mesh.clock.sleep(rng.choice([0.0, 0.0, 0.3]))
        reading.check(stream, is_whole=is_whole)
    except GenerationFailed as error:
        outcomes.append(error.code)
    else:
        outcomes.append("complete")


async def embed(mesh: ScriptedMesh, rng: Random, outcomes: list[str]) -> None:
    """One embedding."""
    ids = tuple(rng.randrange(1000) for _ in range(rng.randint(1, 14)))
    pooling: Pooling = rng.choice(["mean", "last"])
    await mesh.clock.sleep(rng.uniform(0, 2))
    vector = await mesh.generator.embed(ids, pooling, "r")
    assert list(vector) == list(array("f", expected_embedding(ids, pooling, num_layers=NUM_LAYERS)))
    outcomes.append("complete")


def random_options(rng: Random) -> dict[int, dict[str, Any]]:
    """Nodes that cache or do not, fork or do not, and hold few sessions or many."""
    return {
        index: {
            "caches": rng.random() > 0.1,
            "features": rng.choice([FEATURES, FEATURES, ("score", "embed")]),
            "sessions_max": rng.choice([8, 8, 2]),
        }
        for index in range(len(CUTS))
    }


async def run_schedule(seed: int) -> list[str]:
    """Run one schedule and check what must hold after it."""
    rng = Random(seed)
    outcomes: list[str] = []
    journal_bytes_max = rng.choice([1 << 30, 0, 3_000])
    settings: dict[str, Any] = {"journal_bytes_max": journal_bytes_max, "queue_max": 8, "route_wait_s": 60.0}
    async with scripted_mesh(CUTS, node_options=random_options(rng), **settings) as mesh:

        def script(_step: Step, _count: int) -> Fate | None:
            return random_fate(rng) if rng.random() < FAULT_RATE else None

        for node in mesh.nodes:
            node.script = script
            node.loses_fork = lambda _fork: rng.random() < FAULT_RATE
        requests = [rng.choice([generate, generate, generate, embed]) for _ in range(REQUESTS)]
        generations = asyncio.gather(*(request(mesh, rng, outcomes) for request in requests))
        await mesh.drive(generations)
        for node in mesh.nodes:
            node.script = lambda _step, _count: None
        await mesh.drive(mesh.clock.sleep(30))
        await mesh.until(lambda: all(link.is_open for link in mesh.mesh.links))
        await idle()
        mesh.assert_nothing_left()
    assert outcomes == ["complete"] * REQUESTS, "no stream is lost"
    return outcomes


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of faults are logged otherwise."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("seed", range(SCHEDULES), ids="seed{}".format)
async def test_random_faults(seed: int) -> None:
    """Whatever happens to nodes, tokens are the reference's and nothing is left on any node."""
    await run_schedule(seed)
