"""A simulated node that dials the gateway and holds what it is told to, and the fleet that tells it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from gateway.fleet.forecast import Forecast
from gateway.fleet.live import Fleet, FleetModel
from gateway.fleet.members import Members
from gateway.fleet.state import Decision, FleetPolicy
from gateway.generation import Generator
from gateway.joins import Joins
from gateway.mesh import Mesh
from shared.clock import Clock
from shared.errors import MeshError
from shared.mesh_access import MeshAccess
from shared.messages import MachineInfo
from shared.planning.fleet import Demand
from tests.simulation.node import NetworkLink, SimulatedNode
from tests.support.fleet_world import facts
from tests.support.memory_mesh import NUM_LAYERS
from tests.support.scripted_joiner import JOINS_AGAIN_S, Dialled, JoiningNode
from tests.support.scripted_node import MODEL

Serve = Callable[["JoinedNetworkLink", str], Awaitable[None]]


class JoinedNetworkLink(Dialled, NetworkLink):
    """The gateway's end of a link that the node has dialled."""

    def __init__(self, node: SimulatedJoiner, owner: str) -> None:
        super().__init__(node, owner)
        self.hello = node.hello


@dataclass(eq=False)
class SimulatedJoiner(SimulatedNode, JoiningNode):
    """A machine with room for some layers; where it is reachable, it can reach the gateway."""

    @property
    def is_quiet(self) -> bool:
        """As of any node, and it loads nothing."""
        return super().is_quiet and (self._loading is None or self._loading.done())

    async def keep_joining(self, current: Callable[[], tuple[str, Serve]]) -> None:
        """Dial whichever gateway there is, again and again, until cancelled.

        Args:
            current: Its name, and what serves a link there.
        """
        self._start(self._run())
        while True:
            if self._can_dial:
                owner, serve = current()
                link = JoinedNetworkLink(self, owner)
                self.links.append(link)
                with contextlib.suppress(MeshError):
                    await serve(link, self.host)
            await self.clock.sleep(JOINS_AGAIN_S)

    @property
    def _can_dial(self) -> bool:
        is_open = self.there == self.back == "open"
        return self.reachable and not self.stalled and self.refusal is None and is_open


def create_joins(mesh: Mesh, gateway_id: str, clock: Clock) -> Joins:
    """Where nodes join."""
    return Joins(mesh, gateway_id=gateway_id, model=MODEL, access=MeshAccess(), clock=clock)


def create_fleet(mesh: Mesh, generator: Generator, clock: Clock) -> Fleet:
    """What gives them layers of a model whose layers are alike."""
    policy = FleetPolicy()
    return Fleet(
        mesh=mesh,
        members=Members(mesh=mesh, model=MODEL, num_layers=NUM_LAYERS, grace_s=policy.grace_s, clock=clock),
        model=FleetModel(fingerprint=MODEL, name="simulated", num_layers=NUM_LAYERS),
        forecast=Forecast(facts=facts(NUM_LAYERS), demand=Demand(sessions=1, context_len=16)),
        policy=policy,
        is_idle=lambda: not generator.admission.active and not generator.admission.queued,
        clock=clock,
        offload=_inline,
    )


async def _inline(decide: Callable[..., Decision], *values: Any) -> Decision:
    return decide(*values)


def machine(layers: int, layer_ms: float) -> MachineInfo:
    """One with room for so many layers, each of which takes so long."""
    return MachineInfo(memory_bytes=layers * 1_000 + 250, read_bytes_per_s=round(1_000 / layer_ms * 1000))


def has_link(mesh: Mesh, node: SimulatedNode) -> bool:
    """Whether the gateway has an open link to a node."""
    return any(link.is_open and link.node == node.node_id for link in mesh.links)


async def ended(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel these, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
