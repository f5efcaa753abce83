"""A scripted node that dials the gateway, and holds whatever range it is told to.

node = JoiningNode("a", NUM_LAYERS, clock)
node.join(joins)                 # and again by itself whenever its link is lost
node.stop(); node.restart()      # as of a scripted node; a new process holds nothing
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.joins import Joins
from shared.clock import Clock
from shared.errors import MeshError
from shared.handshake import VERSIONS
from shared.layers import LayerRange
from shared.messages import (
    Drain,
    Error,
    Hello,
    Load,
    Loaded,
    MachineInfo,
    Message,
    NodeInfo,
    NodeStats,
    Probe,
    Step,
    Unload,
    Unsupported,
)
from shared.tensor_spec import WireTensor
from tests.support.scripted_link import ScriptedLink
from tests.support.scripted_node import ScriptedNode

JOINS_AGAIN_S = 0.25
MACHINE = MachineInfo(memory_bytes=10_000, runtime_bytes=0, read_bytes_per_s=100_000)


class Dialled:
    """What a link that the node has dialled says beside any other."""

    hello: Hello

    @property
    def peer_node(self) -> NodeInfo | None:
        """The range that it holds already, if any."""
        return self.hello.node

    @property
    def peer_machine(self) -> MachineInfo | None:
        """Its machine."""
        return self.hello.machine


class JoiningLink(Dialled, ScriptedLink):
    """The gateway's end of a link that the node has dialled."""

    def __init__(self, node: JoiningNode) -> None:
        super().__init__(node)
        self.hello = node.hello


@dataclass(eq=False)
class JoiningNode(ScriptedNode):
    """One node; see the module's docstring.

    Args:
        machine: What it says of its machine; None for a node whose range is given.
        holds: Whether it has a range.
        load_s: What loading takes.
        fails: Of a range that it is told to load: why it cannot, if it cannot.
        loads: What it was told to hold.
        bytes_per_s: What its link carries each way, as probes see it; None for a node that knows no probes.
        round_trip_s: What a probe takes besides.
        ignores_probes: It never answers one.
    """

    machine: MachineInfo | None = MACHINE
    holds: bool = False
    load_s: float = 1.0
    fails: dict[str, str] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    unloads: int = 0
    drains: int = 0
    refused_cuts: tuple[int, ...] = ()
    refusals: list[str] = field(default_factory=list)
    host: str = "10.0.0.1"
    bytes_per_s: float | None = None
    round_trip_s: float = 0.0
    ignores_probes: bool = False
    probes: int = 0
    _loading: asyncio.Task[None] | None = None

    @property
    def hello(self) -> Hello:
        """What it says first."""
        node = self.info if self.holds or self.machine is None else None
        return Hello(versions=VERSIONS, role="node", peer=self.node_id, node=node, machine=self.machine)

    def join(self, joins: Joins) -> None:
        """Dial, and again whenever the link is lost, until closed."""
        self._start(self._run())
        self._start(self._keep_joining(joins))

    async def _keep_joining(self, joins: Joins) -> None:
        while True:
            if self.reachable:
                link = JoiningLink(self)
                self.links.append(link)
                try:
                    await joins.serve(link, self.host)
                except MeshError as error:
                    self.refusals.append(error.code)
            await self.clock.sleep(JOINS_AGAIN_S)

    def stop(self) -> None:
        """The process ends, and with it what it holds."""
        super().stop()
        self.holds = self.machine is None
        self.state = "ready"
        if self._loading is not None:
            self._loading.cancel()

    def take(self, link: ScriptedLink, message: Message, tensors: dict[str, WireTensor]) -> None:
        """Act on one message, or keep it for later while stalled."""
        if self.stalled:
            super().take(link, message, tensors)
            return
        match message:
            case Probe():
                self._answer_probe(link, message, tensors)
            case Load():
                self._begin_load(message)
            case Unload():
                self.unloads += 1
                self.holds = False
                self.sessions.clear()
            case Drain():
                self.drains += 1
                self.stop()
            case _:
                super().take(link, message, tensors)

    def _answer_probe(self, link: ScriptedLink, probe: Probe, tensors: dict[str, WireTensor]) -> None:
        self.probes += 1
        if self.ignores_probes:
            return
        if self.bytes_per_s is None:
            link.deliver(Unsupported(unsupported=probe.kind))
            return
        both_ways_bytes = 2 * sum(tensor.data.nbytes for tensor in tensors.values())
        takes_s = self.round_trip_s + both_ways_bytes / self.bytes_per_s
        self._start(self._deliver_late(link, replace(probe, reply=True), tensors, takes_s))

    def drain(self) -> None:
        """As after SIGTERM: it tells every gateway, and goes on with what it has."""
        self.state = "draining"
        self.tell(Drain())

    def _begin_load(self, load: Load) -> None:
        self.loads.append(load)
        self.holds = False
        self.sessions.clear()
        if self._loading is not None:
            self._loading.cancel()
        self._loading = self._start(self._load(load))

    async def _load(self, load: Load) -> None:
        await self.clock.sleep(self.load_s)
        reason = self.fails.get(str(load.layers))
        self.layers, self.holds = load.layers, reason is None
        if self.state != "draining":
            self.state = "failed" if reason else "ready"
        self.tell(Loaded(node=self.info, error=reason))

    @property
    def info(self) -> NodeInfo:
        """What it says of itself."""
        return replace(super().info, refused_cuts=self.refused_cuts)

    def _stats(self) -> NodeStats:
        stats = super()._stats()
        return stats if self.holds or self.state != "ready" else replace(stats, state="loading")

    def _serve(self, step: Step, tensors: dict[str, WireTensor]) -> tuple[Message, dict[str, WireTensor]]:
        if not self.holds:
            session = {"session": step.session, "step_index": step.step_index, "epoch": step.epoch}
            return Error(code="not_ready", message="it holds no range", **session), {}
        return super()._serve(step, tensors)


def create_joining(node_id: str, num_layers: int, clock: Clock, **options: Any) -> JoiningNode:
    """A node that holds nothing yet."""
    return JoiningNode(node_id, LayerRange(0, num_layers), num_layers, clock, **options)
