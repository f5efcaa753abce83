"""A fleet of real processes whose links pass through proxies, so that a test can interfere in mid-stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.link import Link, dial
from shared.messages import Hello, SamplingParams, Step, StepResult
from shared.tensor_spec import WireTensor
from shared.version import SOFTWARE
from tests.support.fleet import Fleet, free_port, running_fleet
from tests.support.link_proxy import LinkProxy

CUTS = ["0:2", "2:4", "4:6"]
DELAY_S = 0.002
"""One way, one hop: keeps a token at about 15 ms, slow enough to step in between two tokens."""
HIDDEN_SIZE = 32
EVICTION_ROUNDS_MAX = 20


@dataclass
class Mesh:
    """A fleet whose links pass through proxies."""

    fleet: Fleet
    proxies: list[LinkProxy]
    ports: list[int]
    evictions: int = field(default=0)

    async def nodes(self) -> list[dict[str, Any]]:
        """The nodes' figures, first layers first."""
        return await asyncio.to_thread(self.fleet.mesh_nodes)

    async def until_held(self, sessions: list[int], within_s: float) -> None:
        """Wait until the nodes hold these numbers of sessions."""
        async with asyncio.timeout(within_s):
            while [node["sessions"] for node in await self.nodes()] != sessions:
                await asyncio.sleep(0.02)

    async def until_ready(self) -> None:
        """Wait until the route is whole again."""
        await asyncio.to_thread(self.fleet.wait_ready)

    async def evict_all(self, hop: int) -> None:
        """Push every session out of one node, as a second gateway with sessions of its own would.

        Again and again until a generation has missed its session: a decode that comes between two of the
        intruders makes its own session the most recently used one.
        """
        node = (await self.nodes())[hop]
        link = await dial(
            f"ws://127.0.0.1:{self.ports[hop]}",
            Hello(versions=(1,), role="gateway", peer="test-evictor", software=SOFTWARE),
        )
        try:
            for _ in range(EVICTION_ROUNDS_MAX):
                for _ in range(node["kv_sessions_max"]):
                    await self.intrude(link, hop)
                if (await self.nodes())[hop]["misses"] != node["misses"]:
                    return
        finally:
            await link.close()

    async def intrude(self, link: Link, hop: int) -> None:
        """Prefill one position of a session that nobody will use."""
        node = link.welcome.node
        assert node is not None
        if hop == 0:
            tensors = {"token_ids": WireTensor("i32", (1, 1), memoryview(bytes(4)))}
        else:
            tensors = {"hidden_states": WireTensor("f32", (1, 1, HIDDEN_SIZE), memoryview(bytes(4 * HIDDEN_SIZE)))}
        self.evictions += 1
        step = Step(
            session=f"evictor-{self.evictions}",
            step_index=0,
            cache="prefill",
            layers=node.layers,
            model=node.model,
            sampling=SamplingParams(temperature=0),
        )
        await link.send(step, tensors)
        assert isinstance((await link.receive())[0], StepResult)


@contextlib.asynccontextmanager
async def mesh_of(model: Path, folder: Path, *, sessions_max: int = 2, **options: Any) -> AsyncIterator[Mesh]:
    """Start proxies here and processes in a thread, since both must run at once.

    Args:
        model: A tiny model of six layers.
        folder: For logs.
        sessions_max: What each node holds at once.
        options: As `running_fleet` takes them, and `more_node_args`.
    """
    async with contextlib.AsyncExitStack() as stack:
        ports = [free_port() for _ in CUTS]
        proxies = [await stack.enter_async_context(LinkProxy(port).run()) for port in ports]
        for proxy in proxies:
            proxy.delay_s = {"there": DELAY_S, "back": DELAY_S}
        node_args = ["--dtype", "float32", "--device", "cpu", "--threads", "1", "--kv-max-sessions", str(sessions_max)]
        starting = running_fleet(
            model,
            CUTS,
            folder,
            node_ports=ports,
            node_urls={index: proxy.url for index, proxy in enumerate(proxies)},
            common_node_args=[*node_args, *options.pop("more_node_args", [])],
            **options,
        )
        fleet = await asyncio.to_thread(starting.__enter__)
        stack.push_async_callback(asyncio.to_thread, starting.__exit__, None, None, None)
        yield Mesh(fleet, proxies, ports)
