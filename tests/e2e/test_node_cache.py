"""Every cache-miss reason, provoked on a running node over a real link."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shard.settings import KvLimits
from shared.layers import LayerRange
from shared.messages import Cancel, Release
from tests.support.fake_clock import FakeClock
from tests.support.fake_model import expected_tokens
from tests.support.fake_node import FakeNode, running_fake_node
from tests.support.fake_runner import KV_BYTES_PER_TOKEN_AND_LAYER, FakeRunner
from tests.support.node_client import NodeClient, connected

PROMPT = [3, 1, 4, 1, 5]
BYTES_PER_TOKEN = 4 * KV_BYTES_PER_TOKEN_AND_LAYER


@pytest.fixture
async def fake() -> AsyncIterator[FakeNode]:
    """A node with the whole model, room for two sessions and time that stands still."""
    limits = KvLimits(sessions_max=2, bytes_max=10 * BYTES_PER_TOKEN, ttl_s=600)
    async with running_fake_node(limits=limits, clock=FakeClock()) as running:
        yield running


@pytest.fixture
async def client(fake: FakeNode) -> AsyncIterator[NodeClient]:
    """A link to it."""
    async with connected(fake.url) as connection:
        yield connection


async def hold(client: NodeClient, session: str) -> None:
    """Make a session of five positions."""
    assert (await client.result(await client.prefill(session, PROMPT))).cached


async def test_cached_tokens_are_the_models(client: NodeClient) -> None:
    """Over a real link, prefill and decode give the tokens of the whole model, and the figures say how."""
    assert await client.generate("s", PROMPT, 5) == expected_tokens(PROMPT, 5, num_layers=4)
    stats = await client.stats()
    assert stats.steps == {"prefill": 1, "decode": 4}
    assert stats.sessions == 1
    assert stats.kv_bytes == 9 * BYTES_PER_TOKEN


async def test_unknown(client: NodeClient) -> None:
    """A session never made."""
    miss = await client.miss(await client.decode("never", 1, 5))
    assert (miss.reason, miss.held_len) == ("unknown", None)


async def test_expired(client: NodeClient, fake: FakeNode) -> None:
    """A session untouched for its time to live."""
    await hold(client, "s")
    clock = fake.node._clock
    assert isinstance(clock, FakeClock)
    clock.jump(599)
    await client.result(await client.decode("s", 1, 5))
    clock.jump(600)
    assert (await client.miss(await client.decode("s", 1, 6))).reason == "expired"


async def test_expired_by_sweep() -> None:
    """Without any step the sweep gives the memory back, and the later miss still says why."""
    clock = FakeClock()
    limits = KvLimits(ttl_s=10, bytes_max=1 << 20)
    async with running_fake_node(limits=limits, clock=clock) as fake, connected(fake.url) as client:
        await hold(client, "s")
        await clock.advance(9)
        assert (await client.stats()).sessions == 1
        await clock.advance(2)
        stats = await client.stats()
        assert (stats.sessions, stats.kv_bytes, stats.evictions) == (0, 0, {"expired": 1})
        assert (await client.miss(await client.decode("s", 1, 5))).reason == "expired"


async def test_evicted_by_number(client: NodeClient) -> None:
    """The third session of a node that holds two."""
    for session in ("a", "b"):
        await client.result(await client.prefill(session, [1, 2]))
    await client.result(await client.decode("a", 1, 2))
    await client.result(await client.prefill("c", [1, 2]))
    assert (await client.miss(await client.decode("b", 1, 2))).reason == "evicted"
    assert (await client.stats()).evictions == {"evicted": 1}


async def test_evicted_by_bytes(client: NodeClient) -> None:
    """A session that grows takes the place of the one untouched for longest."""
    await hold(client, "a")
    await hold(client, "b")
    await client.result(await client.decode("b", 1, 5))
    assert (await client.miss(await client.decode("a", 1, 5))).reason == "evicted"


async def test_past_len_mismatch(client: NodeClient) -> None:
    """One position too few or too many, and a step sent twice; the session itself goes on."""
    await hold(client, "s")
    for past_len in (4, 6):
        miss = await client.miss(await client.decode("s", 1, past_len))
        assert (miss.reason, miss.held_len) == ("past_len_mismatch", 5)
    step = await client.decode("s", 1, 5, step_index=77)
    await client.result(step)
    again = await client.decode("s", 1, 5, step_index=77)
    assert (await client.miss(again)).reason == "past_len_mismatch"
    assert (await client.result(await client.decode("s", 1, 6))).cached


async def test_range_mismatch(client: NodeClient) -> None:
    """A sender that believes the node holds other layers."""
    await hold(client, "s")
    miss = await client.miss(await client.decode("s", 1, 5, layers=LayerRange(0, 2)))
    assert (miss.reason, miss.held_len) == ("range_mismatch", 5)


async def test_model_mismatch(client: NodeClient) -> None:
    """A sender that believes the node serves another model."""
    await hold(client, "s")
    assert (await client.miss(await client.decode("s", 1, 5, model="other"))).reason == "model_mismatch"


@pytest.mark.parametrize("how", ["caching off", "layers reject a cache"])
async def test_disabled(how: str) -> None:
    """A node without cache serves a prefill without keeping it, says so, and misses every decode."""
    supports = how == "caching off"
    runner = FakeRunner(LayerRange(0, 4), 4, supports_kv_cache=supports)
    async with (
        running_fake_node(runner=runner, limits=KvLimits(enabled=not supports, bytes_max=1 << 20)) as fake,
        connected(fake.url) as client,
    ):
        assert not client.info.kv_cache
        result = await client.result(await client.prefill("s", PROMPT))
        assert not result.cached
        assert list(result.token_ids or ()) == expected_tokens(PROMPT, 1, num_layers=4)
        assert (await client.miss(await client.decode("s", 1, 5))).reason == "disabled"
        assert (await client.stats()).misses == {"disabled": 1}


async def test_release_and_cancel_free_the_session(client: NodeClient) -> None:
    """Both free the memory at once; what is decoded afterwards is unknown."""
    for session, ending in (("a", Release(session="a")), ("b", Cancel(session="b"))):
        await client.result(await client.prefill(session, [1, 2]))
        await client.link.send(ending)
        assert (await client.miss(await client.decode(session, 1, 2))).reason == "unknown"
    stats = await client.stats()
    assert stats.evictions == {"released": 1, "cancelled": 1}
    assert (stats.sessions, stats.kv_bytes) == (0, 0)


async def test_session_over_the_budget_is_an_error_each_time(client: NodeClient) -> None:
    """It names the limit; another session stays."""
    await client.result(await client.prefill("small", [1]))
    for _ in range(2):
        error = await client.error(await client.prefill("big", list(range(11))))
        assert error.code == "kv_budget_exceeded"
        assert f"kv_bytes_max is {10 * BYTES_PER_TOKEN}" in error.message
    assert (await client.result(await client.decode("small", 1, 1))).cached


async def test_stale_epoch_and_duplicate_prefill_are_refused(client: NodeClient) -> None:
    """After a replay under a higher epoch, nothing of the earlier one is applied."""
    await hold(client, "s")
    await client.result(await client.prefill("s", PROMPT, epoch=1, step_index=50))
    assert (await client.error(await client.decode("s", 1, 5, epoch=0))).code == "stale_epoch"
    assert (await client.error(await client.prefill("s", [1], epoch=1, step_index=50))).code == "duplicate_step"
    assert (await client.result(await client.decode("s", 1, 5, epoch=1, step_index=51))).cached


async def test_bad_steps_disturb_nobody(client: NodeClient) -> None:
    """Each is answered by field and limit, and the session beside it goes on."""
    await hold(client, "s")
    wrong = {
        "new_len": await client.prefill("x", [1, 2], new_len=0),
        "token_ids": await client.prefill("x", [1, 2], new_len=3),
        "output_len": await client.prefill("x", [1, 2], output_len=3),
        "sampling": await client.prefill("x", [1, 2], sampling=None),
    }
    for field, step in wrong.items():
        error = await client.error(step)
        assert error.code == "bad_step"
        assert error.message.startswith(field)
    assert (await client.error(await client.prefill("x", [1], layers=LayerRange(0, 2)))).code == "range_mismatch"
    assert (await client.error(await client.prefill("x", [1], model="other"))).code == "model_mismatch"
    assert (await client.result(await client.decode("s", 1, 5))).cached
