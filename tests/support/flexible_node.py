"""A node that joins gateways and takes whatever range it is given, in a test's own process, over fake runners.

Every load is within reach: it can be held up, fail, or be large::

    loader = FakeLoader()
    gate = loader.hold_up("0:2")        # until gate.set()
    async with joining_node([gateway.url], loader) as node: ...
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from random import Random
from typing import Any

from shard.assignment import Assignment, Loading
from shard.join import Dial, Join, dial_gateway
from shard.node import Node
from shard.room import Room
from shard.service import NodeService
from shard.settings import Address, KvLimits
from shared.clock import Clock, SystemClock
from shared.mesh_access import MeshAccess
from shared.mesh_tokens import MeshTokens
from shared.messages import MachineInfo
from tests.support.fake_runner import FakeRunner

MACHINE = MachineInfo(memory_bytes=1000, runtime_bytes=100, read_bytes_per_s=1_000_000_000, dtype="f32")
HOLD_S_MAX = 20.0
CHECK_S = 0.002


class FakeLoader:
    """A `LoadRange` whose weights take `bytes_per_layer`, on a machine of 1,000 bytes."""

    def __init__(self, *, bytes_per_layer: int = 10) -> None:
        self.bytes_per_layer = bytes_per_layer
        self.loads: list[Assignment] = []
        self.runners: list[FakeRunner] = []
        self.held_bytes: Callable[[], int] = lambda: 0
        self.failure: Exception | None = None
        self._gates: dict[str, threading.Event] = {}

    def hold_up(self, layers: str) -> threading.Event:
        """Loads of this range wait until the event is set, or until they are not wanted any more."""
        return self._gates.setdefault(layers, threading.Event())

    def __call__(self, assignment: Assignment, loading: Loading) -> FakeRunner:
        """Load a range of the fake model."""
        self.loads.append(assignment)
        loading.progress(0, 100)
        gate = self._gates.get(str(assignment.layers))
        until = time.monotonic() + HOLD_S_MAX
        while gate is not None and not gate.wait(CHECK_S):
            loading.check()
            assert time.monotonic() < until, "nobody has let the load go on"
        if self.failure is not None:
            raise self.failure
        loading.make_room(self.bytes_per_layer * len(assignment.layers), self._measure)
        loading.progress(100, 100)
        self.runners.append(FakeRunner(assignment.layers, assignment.model.num_layers))
        return self.runners[-1]

    def _measure(self) -> Room:
        used = self.held_bytes()
        return Room(free_bytes=MACHINE.memory_bytes - used, used_bytes=used)


def create_service(
    loader: FakeLoader, *, clock: Clock, node_id: str = "joiner", machine: MachineInfo | None = MACHINE
) -> NodeService:
    """A service that takes any range. Needs a running event loop."""
    service = NodeService(
        node_id=node_id, limits=KvLimits(bytes_max=1 << 20), clock=clock, load=loader, machine=machine
    )

    def held_bytes() -> int:
        alive = [held for held in service.keeper.ranges if held.can_serve or held.compute.pending]
        return sum(loader.bytes_per_layer * len(held.assignment.layers) for held in alive)

    loader.held_bytes = held_bytes
    return service


@contextlib.asynccontextmanager
async def joining_node(
    urls: Sequence[str],
    loader: FakeLoader,
    *,
    token: str | None = None,
    clock: Clock | None = None,
    address: Address | None = None,
    drain_timeout_s: float = 2.0,
    dial: Dial = dial_gateway,
    announce: Callable[[Address], None] = lambda _: None,
    **service_fields: Any,
) -> AsyncIterator[tuple[Node, asyncio.Task[int]]]:
    """A node that dials these gateways; it ends with the block."""
    clock = clock or SystemClock()
    service = create_service(loader, clock=clock, **service_fields)
    joins = [Join(url, service=service, token=token, clock=clock, rng=Random(1), dial=dial) for url in urls]
    node = Node(
        service=service,
        fixed=None,
        address=address,
        joins=joins,
        access=MeshAccess(tokens=MeshTokens([token] if token else [])),
        clock=clock,
        drain_timeout_s=drain_timeout_s,
        announce=announce,
    )
    task = asyncio.create_task(node.run())
    try:
        yield node, task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
