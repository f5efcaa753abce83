"""One node process: listen, join, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import structlog

from shard.assignment import Assignment
from shard.join import Join
from shard.server import NodeServer
from shard.service import SWEEP_INTERVAL_S, NodeService
from shard.settings import Address
from shared.clock import Clock
from shared.mesh_access import MeshAccess

DRAIN_POLL_S = 0.02
"""How often a draining node looks whether it has finished."""
FLUSH_TIMEOUT_S = 1.0
"""How long last words may take to leave."""
STOP_TIMEOUT_S = 2.0
"""How long a compute thread may take to notice that it should end; a cancelled step stops between layers."""

log = structlog.stdlib.get_logger(__name__)


class Node:
    """Everything of one node. `run` may be called once.

    Args:
        service: What it answers.
        fixed: The range it holds for as long as it lives; None takes what a gateway gives it.
        address: Where it listens; None joins only.
        joins: Its links to gateways that it dials itself.
        access: Tokens and TLS.
        clock: Monotonic time.
        drain_timeout_s: How long sessions may go on once the node was asked to end.
        announce: Called with the address once it listens.
    """

    def __init__(
        self,
        *,
        service: NodeService,
        fixed: Assignment | None,
        address: Address | None,
        joins: Sequence[Join] = (),
        access: MeshAccess,
        clock: Clock,
        drain_timeout_s: float,
        announce: Callable[[Address], None],
    ) -> None:
        self.service = service
        self._fixed = fixed
        self._address = address
        self._joins = joins
        self._server = NodeServer(service=service, access=access, clock=clock)
        self._clock = clock
        self._drain_timeout_s = drain_timeout_s
        self._announce = announce
        self._stop_asked = asyncio.Event()
        self._has_failed = False
        self.compute_ended = False
        service.on_drain_asked = self.stop
        service.on_load_failed = self._on_load_failed

    def stop(self) -> None:
        """Ask the node to drain and end. Call it on the event loop."""
        self._stop_asked.set()

    async def run(self) -> int:
        """Serve until told to stop, or until the range that it was started for cannot be loaded.

        Returns:
            The process's exit code.

        Raises:
            OSError: The address cannot be listened on.
        """
        async with self._listening():
            if self._fixed is not None:
                self.service.keeper.begin(self._fixed)
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(self._sweep())]
                background += [tasks.create_task(join.run()) for join in self._joins]
                try:
                    await self._stop_asked.wait()
                    if not self._has_failed:
                        await self._drain()
                finally:
                    await self._end()
                    for task in background:
                        task.cancel()
        log.info("node.stopped", discarded=self.service.answers_discarded)
        return 1 if self._has_failed else 0

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        if self._address is None:
            yield
            return
        async with self._server.listening(self._address.host, self._address.port) as (_, port):
            address = Address(self._address.host, port)
            log.info("node.listening", address=str(address), node=self.service.node_id)
            self._announce(address)
            yield

    def _on_load_failed(self) -> None:
        if self._fixed is not None:
            self._has_failed = True
            self.stop()

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_INTERVAL_S)
            self.service.sweep()

    async def _drain(self) -> None:
        for join in self._joins:
            join.stop_dialling()
        log.info("node.draining", sessions=self.service.stats().sessions, timeout_s=self._drain_timeout_s)
        self.service.become_draining()
        deadline = self._clock.monotonic() + self._drain_timeout_s
        while self._has_work() and self._clock.monotonic() < deadline:
            await self._clock.sleep(DRAIN_POLL_S)

    def _has_work(self) -> bool:
        # A session between two steps may be waiting for another hop for as long as that one takes.
        held = self.service.keeper.held
        if held is None:
            return False
        return bool(held.compute.pending) or (bool(held.figures().sessions) and bool(self.service.peers))

    async def _end(self) -> None:
        keeper = self.service.keeper
        keeper.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                for peer in list(self.service.peers):
                    await peer.flush()
        self.compute_ended = await asyncio.to_thread(keeper.join, STOP_TIMEOUT_S)
        if not self.compute_ended:
            log.warning("compute.not_stopped", waited_s=STOP_TIMEOUT_S)


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Within, the first SIGTERM or SIGINT calls `stop`; the second ends the process at once."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def on_signal(number: int) -> None:
        if seen:
            log.warning("node.killed", signal=signal.Signals(number).name)
            os._exit(128 + number)
        seen.append(number)
        stop()

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
