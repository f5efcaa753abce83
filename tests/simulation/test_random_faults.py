"""Random faults at random moments, one seed per schedule: tokens stay right and nothing is left over.

The gateway's whole control logic runs over scripted nodes on a fake clock, so a seed replays its schedule
exactly: ``pytest tests/simulation -k "seed17"``, or call `run_schedule(17)`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import structlog

from gateway.errors import GenerationFailed
from shared.messages import Step
from tests.support.memory_mesh import GREEDY, SEEDED, ScriptedMesh, expected, idle, scripted_mesh
from tests.support.scripted_node import Crash, Cut, Drop, Fail, Fate, Late, Miss, Slow

SCHEDULES = 200
GENERATIONS = 3
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


async def generate(mesh: ScriptedMesh, rng: Random, outcomes: list[str]) -> None:
    """One generation, which may leave early; its tokens must be a prefix of the reference's."""
    max_tokens = rng.randint(1, 12)
    prompt_ids = tuple(rng.randrange(1000) for _ in range(rng.randint(1, 14)))
    fields = {"prompt_ids": prompt_ids, "sampling": rng.choice([GREEDY, SEEDED])}
    leave_after = rng.choice([None, None, rng.randint(1, max_tokens)])
    tokens: list[int] = []
    await mesh.clock.sleep(rng.uniform(0, 2))
    try:
        async with mesh.generator.generation(mesh.request(max_tokens, **fields)) as stream:
            async for token in stream:
                tokens.append(token.id)
                if len(tokens) == leave_after:
                    break
                await mesh.clock.sleep(rng.choice([0.0, 0.0, 0.3]))
    except GenerationFailed as error:
        outcomes.append(error.code)
    else:
        assert len(tokens) == (leave_after or max_tokens)
        outcomes.append("complete")
    assert tokens == expected(max_tokens, **fields)[: len(tokens)]


async def run_schedule(seed: int) -> list[str]:
    """Run one schedule and check what must hold after it."""
    rng = Random(seed)
    outcomes: list[str] = []
    journal_bytes_max = rng.choice([1 << 30, 0, 3_000])
    settings: dict[str, Any] = {"journal_bytes_max": journal_bytes_max, "queue_max": 8, "route_wait_s": 60.0}
    options = {index: {"caches": rng.random() > 0.1} for index in range(len(CUTS))}
    async with scripted_mesh(CUTS, node_options=options, **settings) as mesh:

        def script(_step: Step, _count: int) -> Fate | None:
            return random_fate(rng) if rng.random() < FAULT_RATE else None

        for node in mesh.nodes:
            node.script = script
        generations = asyncio.gather(*(generate(mesh, rng, outcomes) for _ in range(GENERATIONS)))
        await mesh.drive(generations)
        for node in mesh.nodes:
            node.script = lambda _step, _count: None
        await mesh.drive(mesh.clock.sleep(30))
        await mesh.until(lambda: all(link.is_open for link in mesh.mesh.links))
        await idle()
        mesh.assert_nothing_left()
    assert outcomes == ["complete"] * GENERATIONS, "no stream is lost"
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
