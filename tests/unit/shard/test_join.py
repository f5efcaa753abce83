"""Dialling a gateway for ever: how soon, how often, what is said and what is logged. Time is moved by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from random import Random

import pytest
from structlog.testing import capture_logs

from shard.join import REFUSED_RETRY_S_MAX, RETRY_S_MAX, SILENCE_S_MAX, Join
from shard.service import SWEEP_INTERVAL_S, NodeService
from shared.errors import HandshakeRefused, LinkClosed, MeshError
from shared.handshake import VERSIONS
from shared.link import Link, accept, dial_over
from shared.messages import Heartbeat, Hello, Welcome
from tests.support.fake_clock import FakeClock
from tests.support.flexible_node import FakeLoader, create_service
from tests.support.memory_link import MemoryTransport, create_memory_pair

URL = "ws://gateway:8000/mesh"
UNREACHABLE = LinkClosed("unreachable", "nobody there")
DUPLICATE = HandshakeRefused("duplicate_node", "linked already")


class Dialled:
    """A dial whose outcome the test decides, and when it was tried."""

    def __init__(self, clock: FakeClock) -> None:
        self.at: list[float] = []
        self.hellos: list[Hello] = []
        self.failure: MeshError | None = UNREACHABLE
        self.accepted: asyncio.Queue[Link] = asyncio.Queue()
        self.transports: list[MemoryTransport] = []
        self._clock = clock

    async def __call__(self, url: str, hello: Hello) -> Link:
        """As `shard.join.dial_gateway`."""
        assert url == URL
        self.at.append(self._clock.monotonic())
        self.hellos.append(hello)
        if self.failure is not None:
            raise self.failure
        near, far = create_memory_pair()
        self.transports.append(far)
        welcome = Welcome(version=VERSIONS[0], peer="gateway")
        dialled, accepted = await asyncio.gather(dial_over(near, hello), accept(far, answer=lambda _: welcome))
        self.accepted.put_nowait(accepted)
        return dialled

    @property
    def gaps(self) -> list[float]:
        """Seconds between attempts."""
        return [after - before for before, after in zip(self.at, self.at[1:], strict=False)]


class Bench:
    """A join at work, its service, and its dial."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.dialled = Dialled(self.clock)
        self.service: NodeService = create_service(FakeLoader(), clock=self.clock)
        self.join = Join(URL, service=self.service, token="secret", clock=self.clock, rng=Random(1), dial=self.dialled)

        self._begun = asyncio.Event()

    async def advance(self, seconds: float) -> None:
        """Move time; the first time the join begins."""
        self._begun.set()
        await self.clock.advance(seconds)

    async def run(self) -> None:
        """Dial."""
        await self._begun.wait()
        await self.join.run()

    async def sweep(self) -> None:
        """As the node does."""
        while True:
            await self.clock.sleep(SWEEP_INTERVAL_S)
            self.service.sweep()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A join that begins to dial when time is moved."""
    bench = Bench()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(bench.run()), tasks.create_task(bench.sweep())]
        yield bench
        for task in running:
            task.cancel()


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until the condition holds."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def test_first_attempt_is_immediate_and_the_delays_grow_to_their_limit(bench: Bench) -> None:
    """A gateway that comes back is found within `RETRY_S_MAX`, however long it was away."""
    await bench.advance(120)
    assert bench.dialled.at[0] == 1000.0
    gaps = bench.dialled.gaps
    assert gaps[0] <= 0.05
    assert all(RETRY_S_MAX / 2 <= gap <= RETRY_S_MAX for gap in gaps[8:])
    assert max(gaps) <= RETRY_S_MAX


async def test_refused_node_asks_again_slowly(bench: Bench) -> None:
    """The first time soon, since a stale link is soon noticed; then up to `REFUSED_RETRY_S_MAX` apart."""
    bench.dialled.failure = DUPLICATE
    await bench.advance(300)
    gaps = bench.dialled.gaps
    assert 0.5 <= gaps[0] <= 1.0
    assert all(REFUSED_RETRY_S_MAX / 2 <= gap <= REFUSED_RETRY_S_MAX for gap in gaps[6:])


async def test_each_kind_of_failure_is_logged_once(bench: Bench) -> None:
    """Not once for each attempt; a failure of another kind is news."""
    with capture_logs() as logs:
        await bench.advance(60)
        bench.dialled.failure = DUPLICATE
        await bench.advance(60)
        bench.dialled.failure = UNREACHABLE
        await bench.advance(60)
    assert len(bench.dialled.at) > 10
    warnings = [(entry["event"], entry["code"]) for entry in logs if entry["log_level"] == "warning"]
    assert warnings == [("gateway.unreachable", "unreachable"), ("gateway.refuses", "duplicate_node")]


async def test_kinds_of_failure_that_are_remembered_are_bounded(bench: Bench) -> None:
    """A failure whose sentence changes each time costs no memory."""
    for number in range(100):
        bench.dialled.failure = LinkClosed("unreachable", f"reason {number}")
        await bench.advance(6)
    assert len(bench.join._failures) <= 16


async def test_link_that_lasted_starts_the_delays_anew(bench: Bench) -> None:
    """One that ends at once does not: a gateway that takes nodes and drops them is not hammered."""
    await bench.advance(60)
    bench.dialled.failure = None
    await bench.advance(6)
    await bench.dialled.transports[-1].cut()
    await until(lambda: not bench.service.peers)
    await bench.advance(6)
    assert bench.dialled.gaps[-1] >= RETRY_S_MAX / 2
    link = bench.dialled.accepted.get_nowait()
    while not bench.dialled.accepted.empty():
        link = bench.dialled.accepted.get_nowait()
    for _ in range(7):
        await bench.advance(1)
        await link.send(Heartbeat(seq=1))
        await link.receive()
    attempts = len(bench.dialled.at)
    await bench.dialled.transports[-1].cut()
    await until(lambda: not bench.service.peers)
    await bench.advance(0.05)
    assert len(bench.dialled.at) == attempts + 1


async def test_silent_gateway_is_given_up_and_dialled_again(bench: Bench) -> None:
    """A mapping that a NAT has forgotten closes nothing: no heartbeat for `SILENCE_S_MAX`, and the node redials."""
    bench.dialled.failure = None
    await bench.advance(1)
    await until(lambda: bool(bench.service.peers))
    assert len(bench.dialled.at) == 1
    await bench.advance(SILENCE_S_MAX - 2)
    assert len(bench.dialled.at) == 1
    with capture_logs() as logs:
        await bench.advance(4)
        await until(lambda: len(bench.dialled.at) == 2)
    assert [entry["code"] for entry in logs if entry["event"] == "gateway.left"] == ["peer_silent"]


async def test_sweep_that_comes_late_calls_nobody_silent(bench: Bench) -> None:
    """A process that was held up has not read yet what peers sent meanwhile."""
    bench.dialled.failure = None
    await bench.advance(1)
    await until(lambda: bool(bench.service.peers))
    bench.clock.jump(SILENCE_S_MAX + 5)
    bench.service.sweep()
    (peer,) = bench.service.peers
    assert peer.send(Heartbeat(seq=1))


async def test_hello_carries_the_token_and_the_machine(bench: Bench) -> None:
    """And no range, since there is none yet."""
    await bench.advance(1)
    hello = bench.dialled.hellos[0]
    assert (hello.role, hello.peer, hello.token, hello.node) == ("node", "joiner", "secret", None)
    assert hello.machine == bench.service.machine


async def test_nothing_is_dialled_any_more_once_the_node_leaves() -> None:
    """`run` ends by itself after `stop_dialling`."""
    bench = Bench()
    running = asyncio.ensure_future(bench.run())
    await bench.advance(1)
    bench.join.stop_dialling()
    await bench.advance(10)
    assert running.done()
    with contextlib.suppress(asyncio.CancelledError):
        await running
