"""The nodes of a scripted mesh, in this process's event loop: they go and come back when the script says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from shard.settings import KvLimits
from shared.errors import LinkClosed
from shared.layers import LayerRange
from tests.support.fleet import free_port
from tests.support.live_node import LiveNode, running_node
from tests.support.scripted_mesh.director import Director
from tests.support.scripted_mesh.runner import ScriptedRunner
from tests.support.scripted_mesh.script import MeshPart, ScriptError

FINGERPRINT = "scripted"
KV_BYTES_MAX = 1 << 30
"""At a byte for each position: never what limits a script."""


@dataclass(kw_only=True)
class ScriptedMeshNode:
    """One node; `run` keeps it up until cancelled, through its crashes.

    Args:
        node_id: Its id.
        layers: Its range.
        num_layers: Of the whole model.
        hop: Its number on the route.
        director: Knows the script.
        context_len: Positions of the model.
        sessions_max: How many sessions it holds.
    """

    node_id: str
    layers: LayerRange
    num_layers: int
    hop: int
    director: Director
    context_len: int
    sessions_max: int
    port: int = field(default_factory=free_port)
    _live: LiveNode | None = None
    _crashes: asyncio.Queue[float | None] = field(default_factory=asyncio.Queue)

    @property
    def url(self) -> str:
        """Where it listens, whenever it does."""
        return f"ws://127.0.0.1:{self.port}"

    async def run(self) -> None:
        """Serve, crash, wait, and serve again."""
        loop = asyncio.get_running_loop()
        while True:
            async with running_node(
                lambda _progress: self._runner(loop),
                str(self.layers),
                num_layers=self.num_layers,
                port=self.port,
                node_id=self.node_id,
                fingerprint=FINGERPRINT,
                limits=KvLimits(sessions_max=self.sessions_max, bytes_max=KV_BYTES_MAX),
            ) as self._live:
                back_after_s = await self._crashes.get()
            self._live = None
            if back_after_s is None:
                return
            await asyncio.sleep(back_after_s)

    def _runner(self, loop: asyncio.AbstractEventLoop) -> ScriptedRunner:
        def soon(call: Callable[..., None]) -> Callable[..., None]:
            return lambda *arguments: _discard(loop.call_soon_threadsafe(call, *arguments))

        return ScriptedRunner(
            layers=self.layers,
            num_layers=self.num_layers,
            hop=self.hop,
            director=self.director,
            context_len=self.context_len,
            drop_links=soon(self._drop_links),
            crash=soon(self._crash),
        )

    def _drop_links(self) -> None:
        for peer in list(self._live.service.peers) if self._live else []:
            peer.give_up(LinkClosed("link_dropped", "the script says so"))

    def _crash(self, back_after_s: float | None) -> None:
        self._drop_links()
        self._crashes.put_nowait(back_after_s)


def _discard(_value: object) -> None:
    """For a callback whose result nobody wants."""


def create_nodes(mesh: MeshPart, director: Director, *, num_layers: int, context_len: int) -> list[ScriptedMeshNode]:
    """The nodes of all hops, replicas beside each other. Needs a running event loop.

    Raises:
        ScriptError: The model has fewer layers than the mesh has hops.
    """
    if num_layers < mesh.hops:
        raise ScriptError(f"mesh.hops must be at most the {num_layers} layers of the model, got {mesh.hops}")
    bounds = [num_layers * hop // mesh.hops for hop in range(mesh.hops + 1)]
    return [
        ScriptedMeshNode(
            node_id=f"hop-{hop}" + (f"-replica-{replica}" if replica else ""),
            layers=LayerRange(bounds[hop], bounds[hop + 1]),
            num_layers=num_layers,
            hop=hop,
            director=director,
            context_len=context_len,
            sessions_max=mesh.sessions,
        )
        for hop in range(mesh.hops)
        for replica in range(mesh.replicas)
    ]
