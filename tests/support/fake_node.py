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
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from shard.assignment import Progress
from shard.node import stopped_by_signals
from shard.settings import Address, KvLimits
from shared.layers import LayerRange
from shared.log import configure_logging
from shared.parent_watch import exit_with_parent
from tests.support.fake_runner import FakeRunner
from tests.support.live_node import LiveNode, LoadRunner, create_node, running_node

FINGERPRINT = "fake-model"


@dataclass
class FakeNode(LiveNode):
    """A node of hashes in this process's event loop; what it computes is within reach."""

    runner: FakeRunner


@contextlib.asynccontextmanager
async def running_fake_node(
    layers: str = "0:4",
    *,
    num_layers: int = 4,
    runner: FakeRunner | None = None,
    load: LoadRunner | None = None,
    **settings: Any,
) -> AsyncIterator[FakeNode]:
    """A node in this process, as `running_node` makes it, over this runner or a plain one."""
    runner = runner or FakeRunner(LayerRange.parse(layers), num_layers)
    load = load or (lambda _progress: runner)
    async with running_node(load, str(runner.layers), num_layers=runner.num_layers, **settings) as live:
        yield FakeNode(live.node, live.task, live.address, runner)


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
    host, _, port = arguments.listen.rpartition(":")
    node = create_node(
        create_loader(arguments),
        layers=arguments.layers,
        num_layers=arguments.num_layers,
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
        drain_timeout_s=arguments.drain_seconds,
    )
    with stopped_by_signals(node.stop):
        return await node.run()


def create_loader(arguments: argparse.Namespace) -> LoadRunner:
    """What "loads" the runner, in as long as it was told to take."""
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
        until = time.monotonic() + arguments.load_s
        while (left_s := until - time.monotonic()) > 0:
            progress(round(100 * (1 - left_s / arguments.load_s)), 100)
            time.sleep(min(left_s, 0.05))
        return runner

    return load


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
