"""Links to a running node: handshake, heartbeat, cancelling, slow readers, peers that leave, draining."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from websockets.asyncio.client import connect

from shard import peer as peer_module
from shard.peer import SILENCE_S_MAX
from shard.step_queue import QUEUED_STEPS_MAX
from shared.errors import HandshakeRefused, LinkClosed
from shared.layers import LayerRange
from shared.link import dial
from shared.messages import (
    Cancel,
    Drain,
    Error,
    Heartbeat,
    Loaded,
    LoadProgress,
    Release,
    Step,
    StepResult,
    Unsupported,
)
from tests.support.fake_clock import FakeClock
from tests.support.fake_model import expected_tokens
from tests.support.fake_node import FINGERPRINT, FakeNode, running_fake_node
from tests.support.fake_runner import FakeRunner
from tests.support.node_client import NodeClient, connected, gateway_hello

PROMPT = [3, 1, 4, 1, 5]
WHOLE = LayerRange(0, 4)
WAIT_S = 10.0


async def until(condition: Callable[[], bool], what: str) -> None:
    """Poll a condition with a deadline."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        await asyncio.sleep(0.002)


class Gate:
    """Holds steps of one session in the compute thread until opened."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.entered = threading.Event()
        self.opened = threading.Event()

    def before(self, step: Step) -> None:
        """What the runner calls."""
        if step.session == self.session:
            self.entered.set()
            assert self.opened.wait(WAIT_S)


@pytest.fixture
async def fake() -> AsyncIterator[FakeNode]:
    """A node with the whole model."""
    async with running_fake_node() as running:
        yield running


@pytest.fixture
async def gate(fake: FakeNode) -> AsyncIterator[Gate]:
    """Steps of the session `slow` stop in the node until the gate is opened."""
    gate = Gate("slow")
    fake.runner.before = gate.before
    yield gate
    gate.opened.set()


@pytest.fixture
async def client(fake: FakeNode) -> AsyncIterator[NodeClient]:
    """A link to it."""
    async with connected(fake.url) as connection:
        yield connection


async def started(gate: Gate) -> None:
    """Wait until the gate holds a step."""
    assert await asyncio.to_thread(gate.entered.wait, WAIT_S)


# --- handshake ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        ({}, "unauthorized"),
        ({"token": "wrong"}, "unauthorized"),
        ({"token": "secret", "versions": (99,)}, "version_mismatch"),
        ({"token": "secret", "model": "other"}, "model_mismatch"),
    ],
)
async def test_handshake_refuses(hello: dict[str, object], code: str) -> None:
    """Token, version and model are checked before anything else is heard."""
    async with running_fake_node(token="secret") as fake:
        with pytest.raises(HandshakeRefused) as refused:
            await dial(fake.url, gateway_hello(**hello))
        assert refused.value.code == code


async def test_handshake_welcomes_with_the_nodes_description() -> None:
    """The right token and model get in, and learn what the node is."""
    async with (
        running_fake_node("2:4", token="secret", node_id="n") as fake,
        connected(fake.url, token="secret", model=FINGERPRINT) as client,
    ):
        info = client.info
        assert (info.node, info.layers, info.num_layers, info.state) == ("n", LayerRange(2, 4), 4, "ready")
        assert info.is_last
        assert info.token_ids
        assert (info.kv_sessions_max, info.kv_bytes_max, info.kv_bytes_per_token) == (8, 1 << 20, 200)


async def test_number_of_links_is_bounded(fake: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """One link too many is refused by name."""
    monkeypatch.setattr("shard.server.PEERS_MAX", 1)
    async with connected(fake.url):
        with pytest.raises(HandshakeRefused) as refused:
            await dial(fake.url, gateway_hello())
        assert refused.value.code == "too_many_links"


# --- health ---------------------------------------------------------------------------------------


async def test_health_on_the_same_port() -> None:
    """/healthz answers while loading, /readyz only once the node serves; other paths are no web site."""
    release = threading.Event()

    def load(_: object) -> FakeRunner:
        assert release.wait(WAIT_S)
        return FakeRunner(WHOLE, 4)

    async with running_fake_node(load=load, wait_ready=False) as fake, httpx.AsyncClient() as http:
        base = f"http://{fake.address}"
        assert (await http.get(base + "/healthz")).json()["state"] == "loading"
        assert (await http.get(base + "/readyz")).status_code == 503
        assert (await http.get(base + "/")).status_code == 404
        release.set()
        await fake.service.keeper.settled.wait()
        assert (await http.get(base + "/readyz")).status_code == 200


# --- loading --------------------------------------------------------------------------------------


async def test_loading_is_announced_on_links() -> None:
    """A link opened while loading sees progress and the description once it is ready; steps are refused until then."""
    go_on = threading.Semaphore(0)

    def load(progress: Callable[[int, int], None]) -> FakeRunner:
        for done in (0, 50, 100):
            assert go_on.acquire(timeout=WAIT_S)
            progress(done, 100)
        return FakeRunner(WHOLE, 4)

    async with running_fake_node(load=load, wait_ready=False) as fake, connected(fake.url) as client:
        assert client.info.state == "loading"
        error = await client.error(await client.prefill("s", PROMPT))
        assert error.code == "not_ready"
        go_on.release()
        progress, _ = await client.receive(LoadProgress)
        assert (progress.done_bytes, progress.total_bytes) == (0, 100)
        go_on.release(2)
        last, _ = await client.receive(LoadProgress)
        assert last.done_bytes == 100  # 50 came too soon after 0
        loaded, _ = await client.receive(Loaded)
        assert loaded.node.state == "ready"
        assert (await client.result(await client.prefill("s", PROMPT))).cached


async def test_failed_load_is_sent_and_ends_the_node() -> None:
    """Peers get the reason, and the process's exit code is 1."""
    release = threading.Event()

    def load(_: object) -> FakeRunner:
        assert release.wait(WAIT_S)
        raise OSError("the weights are gone")

    async with running_fake_node(load=load, wait_ready=False) as fake, connected(fake.url) as client:
        release.set()
        loaded, _ = await client.receive(Loaded)
        assert loaded.node.state == "failed"
        assert "the weights are gone" in (loaded.error or "")
        assert await fake.task == 1


# --- steps and links ------------------------------------------------------------------------------


async def test_two_gateways_share_a_node(fake: FakeNode, client: NodeClient) -> None:
    """Their sessions are their own, and each gets its own answers."""
    async with connected(fake.url, peer="second") as second:
        both = await asyncio.gather(client.generate("a", PROMPT, 20), second.generate("b", [9, 2], 20))
    assert list(both) == [expected_tokens(PROMPT, 20, num_layers=4), expected_tokens([9, 2], 20, num_layers=4)]


async def test_heartbeat_is_answered_while_computing(client: NodeClient, gate: Gate) -> None:
    """The event loop answers with figures while the compute thread is in a step."""
    await client.prefill("slow", PROMPT)
    await started(gate)
    await client.prefill("behind", PROMPT)
    stats = await client.stats()
    assert stats.queued_steps == 1
    assert stats.sessions == 0


async def test_cancel_stops_a_running_step_and_frees_the_session(client: NodeClient, fake: FakeNode) -> None:
    """Within a second, between layers; the waiting steps of the session go with it."""
    await client.result(await client.prefill("s", PROMPT))
    fake.runner.step_s = 60.0
    running = await client.decode("s", 1, 5)
    await until(lambda: len(fake.runner.seen) == 2, "the step")
    waiting = await client.decode("s", 1, 6)
    cancelled_at = time.monotonic()
    await client.link.send(Cancel(session="s"))
    codes = set()
    for _ in (running, waiting):
        answer, _ = await client.receive(Error)
        codes.add(answer.code)
    assert time.monotonic() - cancelled_at < 1.0
    assert codes == {"cancelled"}
    fake.runner.step_s = 0.0
    assert (await client.miss(await client.decode("s", 1, 5))).reason == "unknown"
    assert len(fake.runner.seen) == 2
    assert (await client.stats()).sessions == 0


async def test_cancelled_prefill_leaves_nothing(client: NodeClient, fake: FakeNode) -> None:
    """A session cancelled while it is being made never appears."""
    fake.runner.step_s = 60.0
    step = await client.prefill("s", PROMPT)
    await until(lambda: len(fake.runner.seen) == 1, "the step")
    await client.link.send(Cancel(session="s"))
    assert (await client.error(step)).code == "cancelled"
    stats = await client.stats()
    assert (stats.sessions, stats.errors) == (0, {"cancelled": 1})


async def test_failed_prefill_leaves_the_held_session(client: NodeClient, fake: FakeNode) -> None:
    """When a replacing prefill fails, decode goes on where the session was, with the right token."""
    tokens = await client.generate("s", PROMPT, 3)

    def fail(step: Step) -> None:
        if step.cache == "prefill":
            raise MemoryError

    fake.runner.before = fail
    assert (await client.error(await client.prefill("s", [1, 2], epoch=1))).code == "out_of_memory"
    result = await client.result(await client.decode("s", tokens[-1], 7))
    assert list(result.token_ids or ()) == expected_tokens(PROMPT, 4, num_layers=4)[3:]


async def test_failed_decode_drops_the_session_alone(client: NodeClient, fake: FakeNode) -> None:
    """After a failure in the stage the session is unknown; another one and the node go on."""
    await client.result(await client.prefill("s", PROMPT))
    await client.result(await client.prefill("t", PROMPT))

    def fail(_: Step) -> None:
        raise ZeroDivisionError

    fake.runner.before = fail
    assert (await client.error(await client.decode("s", 1, 5))).code == "internal_error"
    fake.runner.before = lambda _: None
    assert (await client.miss(await client.decode("s", 1, 5))).reason == "unknown"
    assert (await client.result(await client.decode("t", 1, 5))).cached


async def test_running_session_survives_pressure(fake: FakeNode, client: NodeClient, gate: Gate) -> None:
    """While a step runs, sweeps and limits leave its session alone."""
    gate.opened.set()
    await client.result(await client.prefill("slow", PROMPT))
    gate.entered.clear()
    gate.opened.clear()
    step = await client.decode("slow", 1, 5)
    await started(gate)
    held = fake.service.keeper.held
    assert held is not None
    store = held.store
    assert store is not None
    store.sessions_max = 0
    store.sweep()
    assert store.holds("slow")
    store.sessions_max = 8
    gate.opened.set()
    assert (await client.result(step)).cached
    assert (await client.result(await client.decode("slow", 1, 6))).cached


async def test_link_that_drops_leaves_its_sessions(fake: FakeNode, gate: Gate) -> None:
    """Its waiting steps are dropped, its running one's answer discarded, its sessions stay for another link."""
    async with connected(fake.url) as client:
        await client.result(await client.prefill("kept", PROMPT))
        await client.prefill("slow", PROMPT)
        await started(gate)
        await client.prefill("waiting", PROMPT)
        await until(lambda: fake.service.stats().queued_steps == 1, "the step")
    await until(lambda: not fake.service.peers, "the end of the link")
    gate.opened.set()
    await until(lambda: fake.service.answers_discarded == 1, "the answer")
    assert [step.session for step in fake.runner.seen] == ["kept", "slow"]
    async with connected(fake.url) as client:
        assert (await client.result(await client.decode("kept", 1, 5))).cached
        assert (await client.result(await client.decode("slow", 1, 5))).cached


async def test_slow_reader_loses_its_link_and_nobody_else_notices(
    fake: FakeNode, client: NodeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that a peer does not read are bounded; beyond the limit its link is closed."""
    defaults = peer_module.Peer.__init__.__kwdefaults__
    monkeypatch.setattr(
        peer_module.Peer.__init__, "__kwdefaults__", {**defaults, "frames_max": 4, "bytes_max": 1 << 20}
    )
    slow = await dial(fake.url, gateway_hello(peer="slow"))
    await until(lambda: len(fake.service.peers) == 2, "the link")
    (peer,) = [each for each in fake.service.peers if each.name == "slow"]

    async def stuck(*_: object) -> None:
        await asyncio.sleep(WAIT_S)

    monkeypatch.setattr(peer.link, "send", stuck)
    monkeypatch.setattr(peer.link, "send_now", lambda *_: False)
    for seq in range(6):
        await slow.send(Heartbeat(seq=seq))
    with pytest.raises(LinkClosed, match="slow_reader"):
        await slow.receive()
    await until(lambda: len(fake.service.peers) == 1, "the end of the link")
    assert (await client.result(await client.prefill("s", PROMPT))).cached


async def test_full_queue_is_answered(client: NodeClient, gate: Gate) -> None:
    """The waiting step over the limit gets an error naming it; the rest are served."""
    await client.prefill("slow", PROMPT)
    await started(gate)
    steps = [await client.prefill(f"s{number}", [1, 2]) for number in range(QUEUED_STEPS_MAX + 1)]
    error = await client.error(steps[-1])
    assert error.code == "queue_full"
    assert str(QUEUED_STEPS_MAX) in error.message
    gate.opened.set()
    assert (await client.result(steps[-2])).cached


async def test_higher_epoch_stops_the_running_step(client: NodeClient, fake: FakeNode) -> None:
    """A replay does not wait for the step that it replaces."""
    fake.runner.step_s = 60.0
    old = await client.prefill("s", PROMPT)
    await until(lambda: len(fake.runner.seen) == 1, "the step")
    waiting = await client.decode("s", 1, 5)
    fake.runner.step_s = 0.0
    new = await client.prefill("s", PROMPT, epoch=1)
    answers = {}
    for _ in range(3):
        async with asyncio.timeout(WAIT_S):
            message, _ = await client.link.receive()
        assert isinstance(message, Error | StepResult)
        answers[message.step_index] = message
    for step in (old, waiting):
        refused = answers[step.step_index]
        assert isinstance(refused, Error)
        assert refused.code == "stale_epoch"
    assert isinstance(answers[new.step_index], StepResult)


async def test_messages_that_a_node_does_not_expect(client: NodeClient) -> None:
    """Known kinds that make no sense here are `unsupported`, a release of nothing is no error, the link lives."""
    await client.link.send(LoadProgress(done_bytes=1, total_bytes=2))
    unsupported, _ = await client.receive(Unsupported)
    assert unsupported.unsupported == "load_progress"
    await client.link.send(Release(session="never"))
    assert (await client.stats()).evictions == {}


async def test_garbage_closes_the_link_and_nothing_else(fake: FakeNode, client: NodeClient) -> None:
    """A peer that sends what is no frame is told and cut; the other link goes on."""
    await client.result(await client.prefill("s", PROMPT))
    async with connect(fake.url, compression=None) as raw:
        await raw.send(b"GET / HTTP/1.1\r\n\r\n")
        answer = await raw.recv()
        assert isinstance(answer, bytes)
        assert b"bad_magic" in answer
        await raw.wait_closed()
    assert (await client.result(await client.decode("s", 1, 5))).cached


async def test_silent_peer_is_closed() -> None:
    """A link on which nothing is heard for long is given up, though it never closed."""
    clock = FakeClock()
    async with running_fake_node(clock=clock) as fake, connected(fake.url) as client:
        await clock.advance(SILENCE_S_MAX - 1)
        await client.stats()
        await clock.advance(SILENCE_S_MAX - 1)
        assert fake.service.peers
        await clock.advance(3)
        with pytest.raises(LinkClosed, match="peer_silent"):
            await client.link.receive()


# --- draining -------------------------------------------------------------------------------------


async def test_drain_finishes_what_is_open_and_ends(fake: FakeNode, client: NodeClient) -> None:
    """Peers are told; an open session goes on, a new one is refused; when it is released the node ends with 0."""
    await client.result(await client.prefill("s", PROMPT))
    fake.node.stop()
    await client.receive(Drain)
    assert (await client.result(await client.decode("s", 1, 5))).cached
    assert (await client.error(await client.prefill("new", PROMPT))).code == "draining"
    assert (await client.stats()).state == "draining"
    with pytest.raises(HandshakeRefused, match="draining"):
        await dial(fake.url, gateway_hello())
    await client.link.send(Release(session="s"))
    async with asyncio.timeout(WAIT_S):
        assert await fake.task == 0


async def test_drain_answers_the_steps_that_wait(fake: FakeNode, client: NodeClient, gate: Gate) -> None:
    """What is queued is served before the node ends."""
    gate.opened.set()
    await client.result(await client.prefill("s", PROMPT))
    gate.opened.clear()
    await client.prefill("slow", PROMPT)
    await started(gate)
    step = await client.decode("s", 1, 5)
    await until(lambda: fake.service.stats().queued_steps == 1, "the step")
    fake.node.stop()
    await client.receive(Drain)
    gate.opened.set()
    assert (await client.result(step)).cached
    await client.link.send(Release(session="s"))
    await client.link.send(Release(session="slow"))
    async with asyncio.timeout(WAIT_S):
        assert await fake.task == 0


async def test_drain_waits_for_a_session_between_two_of_its_steps(fake: FakeNode, client: NodeClient) -> None:
    """Another hop may take long over its share; a second and a half without a step is no reason to leave."""
    await client.result(await client.prefill("s", PROMPT))
    fake.node.stop()
    await client.receive(Drain)
    await asyncio.sleep(1.5)  # longer than a node ever waited for a step; below the drain's own deadline
    assert (await client.result(await client.decode("s", 1, 5))).cached
    await client.link.send(Release(session="s"))
    async with asyncio.timeout(WAIT_S):
        assert await fake.task == 0


async def test_drain_has_a_deadline() -> None:
    """A step that takes longer than the node may wait is stopped."""
    runner = FakeRunner(WHOLE, 4, step_s=60.0)
    async with running_fake_node(runner=runner) as fake, connected(fake.url) as client:
        fake.node._drain_timeout_s = 0.05
        await client.prefill("s", PROMPT)
        await until(lambda: len(runner.seen) == 1, "the step")
        fake.node.stop()
        async with asyncio.timeout(WAIT_S):
            assert await fake.task == 0
        assert fake.node.compute_ended
