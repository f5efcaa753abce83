"""A node with a real stage, over real links: every miss reason, halves that make a whole, steps that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import torch

from shard.loader import load_stage
from shard.runner import Runner
from shard.settings import KvLimits
from shard.stage_runner import StageRunner
from shared.layers import LayerRange
from shared.tensor_spec import WireTensor
from tests.support.fake_clock import FakeClock
from tests.support.live_node import LiveNode, running_node
from tests.support.node_client import NodeClient, connected
from tests.support.tiny_models import NUM_LAYERS, build_tiny_model

PROMPT = [5, 17, 42, 7, 99]
BYTES_MAX = 64 * 1024 * 1024


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of six layers."""
    return build_tiny_model("qwen2", tmp_path_factory.mktemp("tiny"))


def loader(model: Path, layers: str) -> Callable[[object], Runner]:
    """What loads a range, on the node's compute thread."""

    def load(_: object) -> Runner:
        torch.set_num_threads(1)
        return StageRunner(load_stage(model, LayerRange.parse(layers), device="cpu", dtype="float32"))

    return load


def real_node(
    model: Path, layers: str = "0:6", limits: KvLimits | None = None, clock: FakeClock | None = None
) -> AbstractAsyncContextManager[LiveNode]:
    """A node with a real stage."""
    limits = limits or KvLimits(bytes_max=BYTES_MAX)
    return running_node(loader(model, layers), layers, num_layers=NUM_LAYERS, limits=limits, clock=clock)


async def test_cached_and_stateless_tokens_are_the_same(model: Path) -> None:
    """What the cache gives step by step is what the whole sequence gives at once."""
    async with real_node(model) as node, connected(node.url) as client:
        tokens = await client.generate("s", PROMPT, 8)
        for count in range(1, 8):
            again = await client.result(await client.prefill("t", [*PROMPT, *tokens[:count]], cache=None))
            assert again.token_ids == (tokens[count],)
            assert not again.cached
        stats = await client.stats()
        assert stats.steps == {"prefill": 1, "decode": 7, "stateless": 7}
        assert stats.sessions == 1
        assert stats.kv_bytes >= client.info.kv_bytes_per_token * (len(PROMPT) + 7)


async def test_every_miss_reason(model: Path) -> None:
    """A real cache is served only at exactly its position, range and model, and says how it was lost."""
    clock = FakeClock()
    limits = KvLimits(sessions_max=2, bytes_max=BYTES_MAX)
    async with real_node(model, limits=limits, clock=clock) as node, connected(node.url) as client:
        tokens = await client.generate("s", PROMPT, 3)
        past_len = len(PROMPT) + 2

        async def reason(session: str = "s", **fields: object) -> str:
            step = await client.decode(session, tokens[-1], **{"past_len": past_len, **fields})  # type: ignore[arg-type]
            return (await client.miss(step)).reason

        assert await reason(past_len=past_len - 1) == "past_len_mismatch"
        assert await reason(layers=LayerRange(0, 3)) == "range_mismatch"
        assert await reason(model="other") == "model_mismatch"
        assert await reason("never") == "unknown"
        assert (await client.result(await client.decode("s", tokens[-1], past_len))).cached
        for session in ("a", "b"):
            await client.result(await client.prefill(session, PROMPT))
        assert await reason() == "evicted"
        clock.jump(600)
        assert await reason("b") == "expired"
    async with (
        real_node(model, limits=KvLimits(enabled=False, bytes_max=BYTES_MAX)) as node,
        connected(node.url) as client,
    ):
        assert not client.info.kv_cache
        assert not (await client.result(await client.prefill("s", PROMPT))).cached
        assert (await client.miss(await client.decode("s", 1, len(PROMPT)))).reason == "disabled"


async def test_two_halves_give_the_whole_models_tokens(model: Path) -> None:
    """Hidden states of the first half go to the second as they come."""
    async with real_node(model) as whole, connected(whole.url) as client:
        expected = await client.generate("s", PROMPT, 8)
    async with (
        real_node(model, "0:3") as first,
        real_node(model, "3:6") as second,
        connected(first.url) as head,
        connected(second.url) as tail,
    ):
        assert not head.info.token_ids
        tokens = [await relay(head, tail, PROMPT, 0)]
        for past_len in range(len(PROMPT), len(PROMPT) + 7):
            tokens.append(await relay(head, tail, tokens[-1:], past_len))
    assert tokens == expected


async def relay(head: NodeClient, tail: NodeClient, ids: list[int], past_len: int) -> int:
    """One step through both halves."""
    mode = {"cache": "decode", "past_len": past_len} if past_len else {"cache": "prefill"}
    await head.prefill("s", ids, **mode)
    _, tensors = await head.link.receive()
    step = await tail.send_step("s", tensors, new_len=len(ids), output_len=1, **mode)
    (token,) = (await tail.result(step)).token_ids or ()
    return token


def hidden(shape: tuple[int, ...], dtype: str = "f32", item_bytes: int = 4) -> dict[str, WireTensor]:
    """Zero hidden states."""
    nbytes = item_bytes * int(torch.tensor(shape).prod())
    return {"hidden_states": WireTensor(dtype, shape, memoryview(bytes(nbytes)))}


@pytest.mark.parametrize(
    ("tensors", "names"),
    [
        ({}, "hidden_states"),
        (hidden((1, 2, 32)), "hidden_states"),
        (hidden((32,)), "hidden_states"),
        (hidden((1, 1, 16)), "hidden_states"),
        (hidden((1, 1, 32), "i32"), "hidden_states"),
    ],
)
async def test_wrong_hidden_states_are_named_and_disturb_nobody(
    model: Path, tensors: dict[str, WireTensor], names: str
) -> None:
    """Missing, of another length, rank, width or kind: an error by name, and another session goes on."""
    async with real_node(model, "3:6") as node, connected(node.url) as client:
        await client.result(await client.send_step("s", hidden((1, 4, 32)), cache="prefill", new_len=4))
        error = await client.error(await client.send_step("x", tensors, cache="prefill"))
        assert error.code == "bad_step"
        assert names in error.message
        step = await client.send_step("s", hidden((1, 1, 32)), cache="decode", past_len=4)
        assert (await client.result(step)).cached


async def test_hidden_states_of_another_element_type_are_converted(model: Path) -> None:
    """The node before may compute in bfloat16."""
    async with real_node(model, "3:6") as node, connected(node.url) as client:
        step = await client.send_step("s", hidden((1, 4, 32), "bf16", 2), cache="prefill", new_len=4)
        assert (await client.result(step)).cached


async def test_wrong_token_id_keeps_the_session(model: Path) -> None:
    """An id without an embedding is refused before anything is computed."""
    async with real_node(model) as node, connected(node.url) as client:
        tokens = await client.generate("s", PROMPT, 2)
        for wrong in (1_000_000, -1):
            error = await client.error(await client.decode("s", wrong, len(PROMPT) + 1))
            assert error.code == "bad_step"
            assert error.message.startswith("token_ids must be from 0 to ")
        assert (await client.result(await client.decode("s", tokens[-1], len(PROMPT) + 1))).cached


async def test_step_past_the_models_positions_is_refused(model: Path) -> None:
    """The model's context length is a limit with a name."""
    async with real_node(model) as node, connected(node.url) as client:
        context_len = client.info.context_len
        assert context_len
        error = await client.error(await client.prefill("s", [1] * (context_len + 1)))
        assert error.message == f"past_len + new_len must be at most {context_len} positions, got {context_len + 1}"
