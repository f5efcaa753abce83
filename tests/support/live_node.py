"""A whole node in a test's own process: the real server, links, queue, compute thread and session store.

The test says what it loads: `tests.support.fake_node` a stage of hashes, others a real stage.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from shard.assignment import Assignment, LoadRange, Progress, ServedModel
from shard.node import Node
from shard.runner import Runner
from shard.service import NodeService
from shard.settings import Address, KvLimits
from shared.clock import Clock, SystemClock
from shared.layers import LayerRange
from shared.mesh_access import MeshAccess
from shared.mesh_tokens import MeshTokens

START_TIMEOUT_S = 30.0

LoadRunner = Callable[[Progress], Runner]
"""Loads the one range of a node whose range is fixed."""


@dataclass
class LiveNode:
    """A node that runs in this process's event loop."""

    node: Node
    task: asyncio.Task[int]
    address: Address

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"ws://{self.address}"

    @property
    def service(self) -> NodeService:
        """Its state and figures."""
        return self.node.service

    def forget_all(self) -> int:
        """Lose every session, as a restart would; returns how many."""
        held = self.service.keeper.held
        assert held is not None
        store = held.store
        assert store is not None
        sessions = list(store._listed)
        for session in sessions:
            store.release(session)
        return len(sessions)

    async def crash(self) -> None:
        """Go without drain: links are closed, sessions are lost."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


def create_node(
    load: LoadRunner,
    *,
    layers: LayerRange,
    num_layers: int,
    address: Address,
    announce: Callable[[Address], None],
    node_id: str = "",
    token: str | None = None,
    access: MeshAccess | None = None,
    fingerprint: str = "fake-model",
    limits: KvLimits | None = None,
    clock: Clock | None = None,
    drain_timeout_s: float = 2.0,
) -> Node:
    """Wire a node. Needs a running event loop."""
    clock = clock or SystemClock()
    load_range: LoadRange = lambda _, loading: load(loading.progress)  # noqa: E731 - a typed adapter
    service = NodeService(
        node_id=node_id or f"node-{layers.start}-{layers.end}",
        limits=limits or KvLimits(bytes_max=1 << 20),
        clock=clock,
        load=load_range,
    )
    return Node(
        service=service,
        fixed=Assignment(ServedModel(fingerprint=fingerprint, name="fake", num_layers=num_layers), layers),
        address=address,
        access=access or MeshAccess(tokens=MeshTokens([token] if token else [])),
        clock=clock,
        drain_timeout_s=drain_timeout_s,
        announce=announce,
    )


@contextlib.asynccontextmanager
async def running_node(
    load: LoadRunner,
    layers: str,
    *,
    num_layers: int,
    port: int = 0,
    wait_ready: bool = True,
    **settings: Any,
) -> AsyncIterator[LiveNode]:
    """A node on loopback; unless told otherwise it is ready when the block is entered. It ends with the block.

    Args:
        load: What it loads.
        layers: Its range.
        num_layers: Of the whole model.
        port: Where it listens; 0 lets the system choose.
        wait_ready: False enters while it is loading.
        settings: As `create_node` takes them.
    """
    listening: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
    node = create_node(
        load,
        layers=LayerRange.parse(layers),
        num_layers=num_layers,
        address=Address("127.0.0.1", port),
        announce=listening.set_result,
        **settings,
    )
    task = asyncio.create_task(node.run())
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            started: list[asyncio.Future[Any]] = [listening, task]
            await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            if wait_ready:
                await node.service.keeper.settled.wait()
        yield LiveNode(node, task, await listening)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
