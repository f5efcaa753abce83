"""The feed between a generation and its reader: bounded, in order, and always left."""

from __future__ import annotations

import asyncio

import pytest

from gateway.generation_request import GenerationRequest
from gateway.token_feed import TokenFeed
from shared.errors import MeshError
from shared.messages import SamplingParams
from tests.support.scripted_generator import FOR_EVER, ScriptedGenerator

REQUEST = GenerationRequest(
    prompt_ids=(1,), choices=(SamplingParams(),), max_tokens=1000, eos_ids=frozenset(), request_id="r"
)
QUIET_S = 5.0


async def read_all(feed: TokenFeed) -> list[int]:
    """Take until the generation has ended and nothing waits."""
    tokens: list[int] = []
    while True:
        taken = await feed.take(QUIET_S)
        if not taken and feed.has_ended:
            return tokens
        tokens += [token.id for token in taken]


async def test_every_token_arrives_in_order():
    """However many come at once."""
    generator = ScriptedGenerator(lambda _: range(500))
    feed = TokenFeed(generator.generation(REQUEST), tokens_max=8)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(feed.run())
        assert await read_all(feed) == list(range(500))
    assert generator.ends == ["left"]


async def test_a_generation_waits_for_a_slow_reader():
    """It runs ahead by no more than the feed holds."""
    generator = ScriptedGenerator(lambda _: range(500))
    feed = TokenFeed(generator.generation(REQUEST), tokens_max=8)
    task = asyncio.create_task(feed.run())
    for _ in range(50):
        await asyncio.sleep(0)
    assert generator.yielded == 8
    assert len(await feed.take(QUIET_S)) == 8
    for _ in range(50):
        await asyncio.sleep(0)
    assert generator.yielded == 16
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (generator.active, generator.ends) == (0, ["cancelled"])


async def test_silence_is_reported():
    """The reader then sends a comment."""
    feed = TokenFeed(ScriptedGenerator(lambda _: [FOR_EVER()]).generation(REQUEST))
    task = asyncio.create_task(feed.run())
    assert await feed.take(0.01) == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_failure_comes_after_the_tokens_before_it():
    """What was generated is not lost, and the failure is the generation's own."""
    failure = MeshError("node_lost", "gone")
    feed = TokenFeed(ScriptedGenerator(lambda _: [1, 2, failure]).generation(REQUEST))
    await feed.run()
    assert [token.id for token in await feed.take(QUIET_S)] == [1, 2]
    with pytest.raises(MeshError, match="gone"):
        await feed.take(QUIET_S)


async def test_a_refusal_to_begin_reaches_the_reader():
    """Entering the generation is part of the task."""
    generator = ScriptedGenerator(admission=[MeshError("queue_full", "full")])
    feed = TokenFeed(generator.generation(REQUEST))
    await feed.run()
    with pytest.raises(MeshError, match="full"):
        await feed.take(QUIET_S)


async def test_a_choice_that_the_reader_is_done_with_ends():
    """The generation is told, and its end shows."""
    generator = ScriptedGenerator(lambda _: range(500))
    feed = TokenFeed(generator.generation(REQUEST), tokens_max=8)
    feed.finish(0)  # before it has begun there is nothing to finish
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(feed.run())
        assert len(await feed.take(QUIET_S)) == 8
        feed.finish(0)
        assert await read_all(feed) == []
    assert (generator.ends, generator.streams[0].finished) == (["left"], [0])


async def test_a_waiting_reader_is_woken_by_fail():
    """A client that leaves ends the wait at once."""
    feed = TokenFeed(ScriptedGenerator(lambda _: [FOR_EVER()]).generation(REQUEST))
    task = asyncio.create_task(feed.run())
    reader = asyncio.create_task(feed.take(QUIET_S))
    await asyncio.sleep(0)
    feed.fail(RuntimeError("left"))
    with pytest.raises(RuntimeError, match="left"):
        await reader
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
