"""One node process: listen, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import structlog

from shard.compute import ComputeThread
from shard.executor import Executor, Outcome
from shard.runner import Runner
from shard.server import NodeServer
from shard.service import NodeService
from shard.settings import Address
from shared.clock import Clock
from shared.errors import MeshError

SWEEP_INTERVAL_S = 1.0
"""How often expired sessions and silent links are looked for."""
LOAD_PROGRESS_INTERVAL_S = 0.25
"""Bars move smoothly at four frames a second; a checkpoint may have thousands of tensors."""
LOAD_LOG_INTERVAL_S = 5.0
"""As above, for a log that people read."""
DRAIN_POLL_S = 0.02
"""How often a draining node looks whether it has finished."""
FLUSH_TIMEOUT_S = 1.0
"""How long last words may take to leave."""
STOP_TIMEOUT_S = 2.0
"""How long the compute thread may take to notice that it should end; a cancelled step stops between layers."""

Progress = Callable[[int, int], None]
LoadRunner = Callable[[Progress], Runner]
"""Loads the stage on the compute thread; calls its argument with bytes done and bytes in all."""

log = structlog.stdlib.get_logger(__name__)


class LoadStopped(Exception):
    """The node was told to end while it was loading."""


class Node:
    """Everything of one node. `run` may be called once.

    Args:
        service: What it answers.
        address: Where it listens.
        token: The mesh token.
        load: Loads the stage.
        clock: Monotonic time.
        drain_timeout_s: How long sessions may go on once the node was asked to end.
        announce: Called with the address once it listens.
    """

    def __init__(
        self,
        *,
        service: NodeService,
        address: Address,
        token: str | None,
        load: LoadRunner,
        clock: Clock,
        drain_timeout_s: float,
        announce: Callable[[Address], None],
    ) -> None:
        self.service = service
        self._address = address
        self._server = NodeServer(service=service, token=token, clock=clock)
        self._load_runner = load
        self._clock = clock
        self._drain_timeout_s = drain_timeout_s
        self._announce = announce
        self._compute = ComputeThread(load=self._load, deliver=self._deliver, loaded=self._loaded)
        self._stop_asked = asyncio.Event()
        self._load_error: Exception | None = None
        self.loaded = asyncio.Event()
        self.compute_ended = False
        self._progress_at = -LOAD_PROGRESS_INTERVAL_S
        self._progress_logged_at = -LOAD_LOG_INTERVAL_S
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Ask the node to drain and end. Call it on the event loop."""
        self._stop_asked.set()

    async def run(self) -> int:
        """Serve until told to stop or until loading fails.

        Returns:
            The process's exit code.

        Raises:
            OSError: The address cannot be listened on.
        """
        async with self._server.listening(self._address.host, self._address.port) as (_, port):
            address = Address(self._address.host, port)
            log.info("node.listening", address=str(address), node=self.service.info.node)
            self._announce(address)
            self.service.attach(self._compute)
            self._compute.start()
            try:
                async with asyncio.TaskGroup() as tasks:
                    sweeping = tasks.create_task(self._sweep())
                    await self._stop_asked.wait()
                    if self._load_error is None:
                        await self._drain()
                    sweeping.cancel()
            finally:
                await self._end()
        log.info("node.stopped", discarded=self.service.answers_discarded)
        return 1 if self._load_error is not None else 0

    # --- on the compute thread ---------------------------------------------------------------

    def _load(self) -> Executor:
        runner = self._load_runner(self._on_progress)
        if runner.layers != self.service.info.layers:
            raise ValueError(f"the stage holds {runner.layers}, not {self.service.info.layers}")
        return self.service.create_executor(runner)

    def _on_progress(self, done_bytes: int, total_bytes: int) -> None:
        if self._stop_asked.is_set():
            raise LoadStopped("told to end while loading")
        now = self._clock.monotonic()
        if done_bytes < total_bytes and now - self._progress_at < LOAD_PROGRESS_INTERVAL_S:
            return
        self._progress_at = now
        if done_bytes == total_bytes or now - self._progress_logged_at >= LOAD_LOG_INTERVAL_S:
            self._progress_logged_at = now
            log.info("stage.loading", done_bytes=done_bytes, total_bytes=total_bytes)
        self._call(self.service.report_progress, done_bytes, total_bytes)

    def _deliver(self, outcomes: list[Outcome]) -> None:
        self._call(self.service.deliver, outcomes)

    def _loaded(self, error: Exception | None) -> None:
        self._call(self._on_loaded, error)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        # A loop that has closed belongs to a node that has ended; nobody is there to be told.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    # --- on the event loop -------------------------------------------------------------------

    def _on_loaded(self, error: Exception | None) -> None:
        self.loaded.set()
        if error is None:
            self._on_ready()
        elif not isinstance(error, LoadStopped):
            self._on_failed(error)

    def _on_ready(self) -> None:
        self.service.become_ready()
        info = self.service.info
        log.info(
            "node.ready",
            layers=str(info.layers),
            device=info.device,
            dtype=info.dtype,
            kv_cache=info.kv_cache,
            kv_bytes_max=info.kv_bytes_max,
            kv_bytes_per_token=info.kv_bytes_per_token,
        )

    def _on_failed(self, error: Exception) -> None:
        self._load_error = error
        self.service.become_failed(error)
        if isinstance(error, MeshError):
            log.error("node.failed", code=error.code, reason=error.message)
        else:
            log.error("node.failed", reason=str(error), exc_info=error)
        self.stop()

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_INTERVAL_S)
            self.service.sweep()

    async def _drain(self) -> None:
        log.info("node.draining", sessions=self.service.stats().sessions, timeout_s=self._drain_timeout_s)
        self.service.become_draining()
        deadline = self._clock.monotonic() + self._drain_timeout_s
        while self._has_work() and self._clock.monotonic() < deadline:
            await self._clock.sleep(DRAIN_POLL_S)

    def _has_work(self) -> bool:
        # A session between two steps may be waiting for another hop for as long as that one takes.
        return bool(self._compute.pending) or (bool(self.service.stats().sessions) and bool(self.service.peers))

    async def _end(self) -> None:
        self._compute.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                for peer in list(self.service.peers):
                    await peer.flush()
        self.compute_ended = await asyncio.to_thread(self._compute.join, STOP_TIMEOUT_S)
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
