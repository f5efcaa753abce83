"""A whole node over `FakeRunner`: the real server, links, queue, compute thread and session store, no weights.

In a test's own process, with everything within reach::

    async with running_fake_node("0:2", num_layers=4) as fake:
        link = await dial(fake.url, ...)
        fake.forget_all()          # the next decode of any session misses

As a process that can be killed, ready in a third of a second; it prints ``listening on ws://HOST:PORT``::

    python -m tests.support.fake_node --listen 127.0.0.1:0 --layers 0:2 --num-layers 4

`tests.support.fake_model.expected_tokens` says what the mesh must generate, wherever the layers are cut.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

from shard.node import LoadRunner, Node, Progress, stopped_by_signals
from shard.service import NodeService, ServedModel
from shard.settings import Address, KvLimits
from shared.clock import Clock, SystemClock
from shared.layers import LayerRange
from shared.log import configure_logging
from shared.parent_watch import exit_with_parent
from tests.support.fake_runner import FakeRunner

FINGERPRINT = "fake-model"
START_TIMEOUT_S = 10.0


@dataclass
class FakeNode:
    """A node that runs in this process's event loop."""

    node: Node
    runner: FakeRunner
    task: asyncio.Task[int] = field(init=False)
    address: Address = field(init=False)

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
        store = self.service.store
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


def create_fake_node(
    runner: FakeRunner,
    *,
    address: Address,
    announce: Callable[[Address], None],
    node_id: str = "",
    token: str | None = None,
    fingerprint: str = FINGERPRINT,
    limits: KvLimits | None = None,
    clock: Clock | None = None,
    load: LoadRunner | None = None,
    drain_timeout_s: float = 2.0,
) -> Node:
    """Wire a node around a fake runner. Needs a running event loop."""
    clock = clock or SystemClock()
    service = NodeService(
        node_id=node_id or f"fake-{runner.layers.start}-{runner.layers.end}",
        model=ServedModel(fingerprint=fingerprint, name="fake", num_layers=runner.num_layers),
        layers=runner.layers,
        limits=limits or KvLimits(bytes_max=1 << 20),
        clock=clock,
    )
    return Node(
        service=service,
        address=address,
        token=token,
        load=load or (lambda _progress: runner),
        clock=clock,
        drain_timeout_s=drain_timeout_s,
        announce=announce,
    )


@contextlib.asynccontextmanager
async def running_fake_node(
    layers: str = "0:4",
    *,
    num_layers: int = 4,
    port: int = 0,
    runner: FakeRunner | None = None,
    wait_ready: bool = True,
    node_id: str = "",
    token: str | None = None,
    fingerprint: str = FINGERPRINT,
    limits: KvLimits | None = None,
    clock: Clock | None = None,
    load: LoadRunner | None = None,
) -> AsyncIterator[FakeNode]:
    """A node in this process; by default it is ready when the block is entered. It ends with the block."""
    runner = runner or FakeRunner(LayerRange.parse(layers), num_layers)
    listening: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
    node = create_fake_node(
        runner,
        address=Address("127.0.0.1", port),
        announce=listening.set_result,
        node_id=node_id,
        token=token,
        fingerprint=fingerprint,
        limits=limits,
        clock=clock,
        load=load,
    )
    fake = FakeNode(node, runner)
    fake.task = asyncio.create_task(node.run())
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            started: list[asyncio.Future[Any]] = [listening, fake.task]
            await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
            if fake.task.done():
                await fake.task
            fake.address = await listening
            if wait_ready:
                await node.loaded.wait()
        yield fake
    finally:
        await fake.crash()


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of a fake node."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.fake_node", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--layers", type=LayerRange.parse, required=True, metavar="START:END")
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--node-id", default="")
    parser.add_argument("--fingerprint", default=FINGERPRINT)
    parser.add_argument("--mesh-token")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=0.0, help="what each step takes")
    parser.add_argument("--position-ms", type=float, default=0.0, help="what each entering position takes on top")
    parser.add_argument("--load-s", type=float, default=0.0, help="how long loading takes")
    parser.add_argument("--no-kv-cache", action="store_true", help="caching off")
    parser.add_argument("--rejects-kv-cache", action="store_true", help="a model whose layers reject a cache")
    parser.add_argument("--text-tail", action="store_true", help="an old tail: text instead of token ids")
    parser.add_argument("--kv-ttl-seconds", type=float, default=600.0)
    parser.add_argument("--kv-max-sessions", type=int, default=8)
    parser.add_argument("--kv-max-bytes", type=int, default=1 << 20)
    parser.add_argument("--drain-seconds", type=float, default=2.0)
    return parser.parse_args(arguments)


async def run_fake_node(arguments: argparse.Namespace) -> int:
    """Run until signalled; returns the exit code."""
    clock = SystemClock()
    runner = FakeRunner(
        arguments.layers,
        arguments.num_layers,
        vocab_size=arguments.vocab_size,
        step_s=arguments.step_ms / 1000,
        position_s=arguments.position_ms / 1000,
        supports_kv_cache=not arguments.rejects_kv_cache,
        text_tail=arguments.text_tail,
    )

    def load(progress: Progress) -> FakeRunner:
        until = clock.monotonic() + arguments.load_s
        while (left_s := until - clock.monotonic()) > 0:
            progress(round(100 * (1 - left_s / arguments.load_s)), 100)
            time.sleep(min(left_s, 0.05))
        return runner

    host, _, port = arguments.listen.rpartition(":")
    node = create_fake_node(
        runner,
        address=Address(host, int(port)),
        announce=_announce,
        node_id=arguments.node_id,
        token=arguments.mesh_token,
        fingerprint=arguments.fingerprint,
        limits=KvLimits(
            enabled=not arguments.no_kv_cache,
            ttl_s=arguments.kv_ttl_seconds,
            sessions_max=arguments.kv_max_sessions,
            bytes_max=arguments.kv_max_bytes,
        ),
        clock=clock,
        load=load,
        drain_timeout_s=arguments.drain_seconds,
    )
    with stopped_by_signals(node.stop):
        return await node.run()


def _announce(address: Address) -> None:
    sys.stdout.write(f"listening on ws://{address}\n")
    sys.stdout.flush()


def main() -> int:
    """Run a fake node as a process; it ends with its parent."""
    arguments = parse_arguments()
    exit_with_parent()
    configure_logging(level="info", json=None)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        return loop.run(run_fake_node(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
