"""A node that joins: what it says, the ranges it is given and loses, several gateways, leaving and coming back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from shard.settings import Address
from shared.errors import LoadFailed
from shared.layers import LayerRange
from shared.messages import (
    PROBE_BYTES_MAX,
    Drain,
    Heartbeat,
    LoadProgress,
    Probe,
    Refused,
    Release,
    Unload,
    Unsupported,
)
from shared.tensor_spec import WireTensor
from tests.support.fake_gateway import FakeGateway, JoinedNode, running_gateway
from tests.support.fake_model import expected_tokens
from tests.support.fake_runner import FakeRunner
from tests.support.flexible_node import MACHINE, FakeLoader, joining_node
from tests.support.node_client import connected

PROMPT = [3, 1, 4, 1, 5]
WAIT_S = 10.0


async def until(condition: Callable[[], bool], what: str) -> None:
    """Poll a condition with a deadline."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        await asyncio.sleep(0.002)


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    """A gateway that takes anybody."""
    async with running_gateway() as running:
        yield running


@pytest.fixture
def loader() -> FakeLoader:
    """What the node loads."""
    return FakeLoader()


@pytest.fixture
async def node(gateway: FakeGateway, loader: FakeLoader) -> AsyncIterator[JoinedNode]:
    """The gateway's link to a node that has joined and holds nothing."""
    async with joining_node([gateway.url], loader):
        yield await gateway.joined()


# --- what it says ---------------------------------------------------------------------------------


async def test_unassigned_node_says_what_it_offers_and_serves_nothing(node: JoinedNode) -> None:
    """Its machine, no range; heartbeats are answered, and steps refused by name."""
    assert node.hello.role == "node"
    assert (node.hello.peer, node.hello.node, node.hello.machine) == ("joiner", None, MACHINE)
    assert (await node.stats()).state == "loading"
    error = await node.error(await node.prefill("s", PROMPT))
    assert (error.code, error.message) == ("not_ready", "the node holds no layers")


async def test_load_is_fetched_read_and_served(node: JoinedNode, loader: FakeLoader) -> None:
    """Progress, then the whole description, then steps; the model's files are asked of the gateway that was dialled."""
    loaded = await node.load("0:4")
    assert (loaded.node.layers, loaded.node.num_layers, loaded.node.kv_bytes_per_token) == (LayerRange(0, 4), 4, 400)
    assert [message.done_bytes for message in node.others if isinstance(message, LoadProgress)] == [0, 100]
    assert await node.generate("s", PROMPT, 8) == expected_tokens(PROMPT, 8, num_layers=4)
    assert (loader.loads[0].files_url or "").startswith("http://127.0.0.1:")
    assert (loader.loads[0].files_url or "").endswith("/files")


async def test_the_memory_that_is_shown_is_what_the_node_may_use(node: JoinedNode) -> None:
    """`--memory`, or what it offered in its place, and not all that the device has."""
    assert (await node.stats()).memory_limit_bytes == MACHINE.memory_bytes
    await node.load("0:4")
    assert (await node.stats()).memory_limit_bytes == MACHINE.memory_bytes < FakeRunner.memory_limit_bytes


async def test_load_of_what_is_held_is_answered_at_once(node: JoinedNode, loader: FakeLoader) -> None:
    """Nothing is read again, and its sessions stay."""
    await node.load("0:4")
    await node.result(await node.prefill("s", PROMPT))
    await node.load("0:4")
    assert len(loader.loads) == 1
    assert (await node.result(await node.decode("s", 1, 5))).cached


async def test_token_opens_the_gateway(loader: FakeLoader) -> None:
    """The mesh token is presented; without it a gateway refuses the node, which asks again later."""
    async with running_gateway(token="secret") as gateway, joining_node([gateway.url], loader, token="secret"):
        assert (await gateway.joined()).hello.token == "secret"


# --- from one range to the next -------------------------------------------------------------------


async def test_old_range_serves_until_the_next_is_ready(node: JoinedNode, loader: FakeLoader) -> None:
    """With room for both nothing is refused meanwhile; then steps of the old range are misses that say why."""
    await node.load("0:4")
    old = node.info
    await node.result(await node.prefill("s", PROMPT))
    gate = loader.hold_up("0:2")
    await node.ask("0:2")
    await until(lambda: len(loader.loads) == 2, "the load")
    assert (await node.result(await node.decode("s", 1, 5))).cached
    assert (await node.stats()).state == "ready"
    gate.set()
    assert (await node.loaded()).node.layers == LayerRange(0, 2)
    miss = await node.miss(await node.decode("s", 1, 6, layers=old.layers))
    assert miss.reason == "range_mismatch"
    assert (await node.error(await node.prefill("t", PROMPT, layers=old.layers))).code == "range_mismatch"
    assert (await node.result(await node.prefill("t", PROMPT))).cached
    stats = await node.stats()
    assert (stats.sessions, stats.steps["decode"], stats.misses["range_mismatch"]) == (1, 1, 1)


async def test_steps_that_wait_when_the_range_changes_are_answered(node: JoinedNode, loader: FakeLoader) -> None:
    """The running step ends with its token, the waiting one learns that its range is gone."""
    await node.load("0:4")
    old = node.info.layers
    loader.runners[0].step_s = 0.5
    running = await node.prefill("s", PROMPT)
    await until(lambda: bool(loader.runners[0].seen), "the step")
    waiting = await node.prefill("t", PROMPT)
    await node.ask("0:2")
    assert (await node.error(waiting)).code == "range_mismatch"
    assert (await node.result(running)).token_ids == tuple(expected_tokens(PROMPT, 1, num_layers=4))
    assert (await node.error(await node.prefill("u", PROMPT, layers=old))).code == "range_mismatch"


async def test_without_room_for_both_the_old_range_goes_first(node: JoinedNode, loader: FakeLoader) -> None:
    """It serves while weights are fetched, and steps are refused only while they are read."""
    loader.bytes_per_layer = 200
    await node.load("0:4")
    gate = loader.hold_up("1:4")
    await node.ask("1:4")
    await until(lambda: len(loader.loads) == 2, "the load")
    assert (await node.result(await node.prefill("s", PROMPT))).cached
    gate.set()
    assert (await node.loaded("loading")).node.layers == LayerRange(1, 4)
    assert (await node.loaded()).node.layers == LayerRange(1, 4)


async def test_running_step_of_a_range_that_leaves_is_bounded(
    node: JoinedNode, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its memory is needed it is cancelled after `RUNNING_STEP_S_MAX`, and the new range is read."""
    monkeypatch.setattr("shard.range_keeper.RUNNING_STEP_S_MAX", 0.05)
    loader.bytes_per_layer = 200
    await node.load("0:4")
    loader.runners[0].step_s = 60.0
    running = await node.prefill("s", PROMPT)
    await until(lambda: bool(loader.runners[0].seen), "the step")
    await node.ask("1:4")
    assert (await node.error(running)).code == "cancelled"
    assert (await node.loaded()).node.layers == LayerRange(1, 4)


async def test_range_that_does_not_leave_fails_the_load(
    node: JoinedNode, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is stuck in a native call keeps its memory: the load says so instead of waiting for ever."""
    monkeypatch.setattr("shard.range_keeper.RUNNING_STEP_S_MAX", 0.05)
    monkeypatch.setattr("shard.range_keeper.LEAVE_S_MAX", 0.05)
    loader.bytes_per_layer = 200
    await node.load("0:4")
    go_on = threading.Event()
    loader.runners[0].before = lambda _: assert_set(go_on)
    await node.prefill("s", PROMPT)
    await until(lambda: bool(loader.runners[0].seen), "the step")
    await node.ask("1:4")
    assert (await node.loaded("failed")).error == "layers 0:4 do not give their memory back"
    go_on.set()
    await node.load("1:4")


def assert_set(event: threading.Event) -> None:
    """Block until the event is set."""
    assert event.wait(WAIT_S)


async def test_range_that_can_never_fit_is_refused_and_the_old_one_stays(node: JoinedNode, loader: FakeLoader) -> None:
    """The answer names bytes; what was held is held still, and said again."""
    await node.load("0:2")
    await node.result(await node.prefill("s", PROMPT))
    loader.bytes_per_layer = 300
    await node.ask("0:4")
    failed = await node.loaded("failed")
    assert failed.node.layers == LayerRange(0, 4)
    assert failed.error == "the range's weights take 1200 bytes, and this node has 900 for weights and sessions"
    assert (await node.loaded()).node.layers == LayerRange(0, 2)
    assert (await node.result(await node.decode("s", 1, 5))).cached


@pytest.mark.parametrize(
    ("failure", "says"),
    [(LoadFailed("weights_corrupt", "the file is cut short"), "the file is cut short"), (OSError("no"), "OSError: no")],
)
async def test_failed_load_is_answered_and_the_node_lives(
    node: JoinedNode, loader: FakeLoader, failure: Exception, says: str
) -> None:
    """The reason names the range that was asked for; the next load is obeyed."""
    loader.failure = failure
    await node.ask("0:2")
    failed = await node.loaded("failed")
    assert (failed.node.layers, failed.error) == (LayerRange(0, 2), says)
    assert (await node.error(await node.prefill("s", PROMPT))).code == "not_ready"
    loader.failure = None
    await node.load("0:2")
    assert (await node.result(await node.prefill("s", PROMPT))).cached


async def test_range_outside_the_model_is_refused(node: JoinedNode, loader: FakeLoader) -> None:
    """Nothing is fetched for it."""
    await node.ask("2:9")
    assert (await node.loaded("failed")).error == "layers 2:9 end after the last of 4"
    assert not loader.loads


async def test_load_supersedes_the_one_under_way(node: JoinedNode, loader: FakeLoader) -> None:
    """The first is given up where it waits; only the second becomes ready."""
    loader.hold_up("0:2")
    await node.ask("0:2")
    await until(lambda: len(loader.loads) == 1, "the load")
    await node.load("0:4")
    assert node.info.layers == LayerRange(0, 4)
    assert [runner.layers for runner in loader.runners] == [LayerRange(0, 4)]


async def test_load_of_the_held_range_ends_the_one_under_way(node: JoinedNode, loader: FakeLoader) -> None:
    """A gateway that changes its mind back has its range at once."""
    await node.load("0:4")
    loader.hold_up("0:2")
    await node.ask("0:2")
    await until(lambda: len(loader.loads) == 2, "the load")
    await node.load("0:4")
    await node.load("0:4")
    assert len(loader.loads) == 2
    assert node.info.layers == LayerRange(0, 4)


async def test_unload_gives_everything_back(node: JoinedNode, loader: FakeLoader) -> None:
    """Steps are refused, figures go on, and what is loaded next is loaded anew."""
    await node.load("0:4")
    await node.result(await node.prefill("s", PROMPT))
    await node.link.send(Unload())
    assert (await node.error(await node.decode("s", 1, 5))).message == "the node holds no layers"
    stats = await node.stats()
    assert (stats.state, stats.sessions, stats.kv_bytes, stats.steps) == ("loading", 0, 0, {"prefill": 1})
    await node.load("0:4")
    assert len(loader.loads) == 2
    assert (await node.miss(await node.decode("s", 1, 5))).reason == "unknown"


async def test_unload_ends_a_load(node: JoinedNode, loader: FakeLoader) -> None:
    """A node that was about to hold something holds nothing."""
    loader.hold_up("0:2")
    await node.ask("0:2")
    await until(lambda: len(loader.loads) == 1, "the load")
    await node.link.send(Unload())
    assert (await node.error(await node.prefill("s", PROMPT))).message == "the node holds no layers"
    assert not loader.runners


# --- several gateways -----------------------------------------------------------------------------


async def test_first_gateway_has_the_say_while_it_is_linked(loader: FakeLoader) -> None:
    """Another one's load of another range fails without disturbing anything; the same range is shared."""
    async with (
        running_gateway(name="second") as other,
        running_gateway(name="first") as gateway,
        joining_node([gateway.url, other.url], loader) as (running, _),
    ):
        first, second = await gateway.joined(), await other.joined()
        await first.load("0:4")
        await second.loaded()
        await first.result(await first.prefill("s", PROMPT))
        await second.ask("0:2")
        failed = await second.loaded("failed")
        assert (failed.node.layers, failed.error) == (LayerRange(0, 2), "held for gateway first")
        assert (await second.loaded()).node.layers == LayerRange(0, 4)
        await second.load("0:4")
        await second.link.send(Unload())
        assert (await second.result(await second.prefill("t", PROMPT))).cached
        assert (await first.result(await first.decode("s", 1, 5))).cached
        assert len(loader.loads) == 1
        assert not [each for each in first.others if not isinstance(each, LoadProgress | Heartbeat)]
        gateway.refusals = [Refused(code="draining")] * 9
        await first.link.close()
        await until(lambda: not running.service.is_linked("first"), "the end of the link")
        await second.load("0:2")
        assert len(loader.loads) == 2


async def test_gateway_with_another_model_is_joined_without_the_range_it_refuses(
    gateway: FakeGateway, loader: FakeLoader
) -> None:
    """A range of a model that this gateway does not serve any more does not keep the machine from it."""
    async with joining_node([gateway.url], loader):
        node = await gateway.joined()
        await node.load("0:4")
        gateway.model = "new-model"
        await node.link.close()
        again = await gateway.joined()
        assert [hello.node is None for hello in gateway.hellos] == [True, False, True]
        assert again.hello.machine == MACHINE
        assert (await again.load("0:2", model="new-model")).node.model == "new-model"


# --- leaving and coming back ----------------------------------------------------------------------


async def test_node_comes_back_to_a_gateway_that_comes_back(loader: FakeLoader) -> None:
    """Under its own name and with its range, within its back-off; its sessions are still there."""
    async with running_gateway() as gateway:
        port = int(gateway.url.split(":")[2].partition("/")[0])
        async with joining_node([gateway.url], loader):
            pass
    async with joining_node([f"ws://127.0.0.1:{port}/mesh"], loader):
        async with running_gateway(port=port) as gateway:
            node = await gateway.joined()
            await node.load("0:4")
            await node.result(await node.prefill("s", PROMPT))
        gone_at = time.monotonic()
        await asyncio.sleep(0.3)
        async with running_gateway(port=port) as gateway:
            node = await gateway.joined()
            assert time.monotonic() - gone_at < 5.0
            assert node.hello.peer == "joiner"
            assert node.hello.node is not None
            assert node.hello.node.layers == LayerRange(0, 4)
            assert (await node.result(await node.decode("s", 1, 5))).cached
            await node.load("0:4")
            assert len(loader.loads) == 1


async def test_refused_node_asks_again(loader: FakeLoader) -> None:
    """A gateway that still believes in the node's lost link has it again a second later."""
    refusal = Refused(code="duplicate_node", message="joiner is linked already")
    async with running_gateway(refusals=[refusal]) as gateway, joining_node([gateway.url], loader):
        await gateway.joined()
        assert len(gateway.hellos) == 2


async def test_drain_asked_by_a_gateway(gateway: FakeGateway, loader: FakeLoader) -> None:
    """Links hear of it, the open session goes on, new ones and loads are refused, and the node ends with 0."""
    async with joining_node([gateway.url], loader, drain_timeout_s=20.0) as (_, task):
        node = await gateway.joined()
        await node.load("0:4")
        await node.result(await node.prefill("s", PROMPT))
        await node.link.send(Drain())
        await node.receive(Drain)
        assert (await node.error(await node.prefill("new", PROMPT))).code == "draining"
        await node.ask("0:2")
        assert (await node.loaded("failed")).error == "the node is leaving"
        await node.loaded("draining")
        assert (await node.result(await node.decode("s", 1, 5))).cached
        assert (await node.stats()).state == "draining"
        await node.link.send(Release(session="s"))
        assert await asyncio.wait_for(task, WAIT_S) == 0


async def test_unassigned_node_drains_at_once(gateway: FakeGateway, loader: FakeLoader) -> None:
    """There is nothing to wait for."""
    async with joining_node([gateway.url], loader, drain_timeout_s=60.0) as (node, task):
        await gateway.joined()
        node.stop()
        assert await asyncio.wait_for(task, WAIT_S) == 0


async def test_joining_and_listening(gateway: FakeGateway, loader: FakeLoader) -> None:
    """A node that also listens says the same to who dials it, and answers for its health."""
    listening: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
    address = Address("127.0.0.1", 0)
    async with joining_node([gateway.url], loader, address=address, announce=listening.set_result):
        node = await gateway.joined()
        url = f"127.0.0.1:{(await listening).port}"
        async with httpx.AsyncClient() as http:
            body = {"state": "loading", "node": "joiner", "layers": None}
            assert (await http.get(f"http://{url}/healthz")).json() == body
            assert (await http.get(f"http://{url}/readyz")).status_code == 503
            await node.load("0:4")
            assert (await http.get(f"http://{url}/readyz")).status_code == 200
        async with connected(f"ws://{url}") as client:
            assert client.link.welcome.machine == MACHINE
            assert (await client.result(await client.prefill("s", PROMPT))).cached


async def test_a_probe_comes_back_as_it_was_unless_it_is_too_large(node: JoinedNode) -> None:
    """At once, whatever is being computed; one over the limit is not answered with as much again."""
    for size, answer in ((0, Probe), (1000, Probe), (PROBE_BYTES_MAX, Probe), (PROBE_BYTES_MAX + 1, Unsupported)):
        payload = {"payload": WireTensor("u8", (size,), memoryview(bytes(size)))}
        await node.link.send(Probe(seq=size), payload)
        message, tensors = await node.receive(answer)
        if isinstance(message, Probe):
            assert (message.seq, message.reply, tensors["payload"].data.nbytes) == (size, True, size)
