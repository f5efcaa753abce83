"""A gateway core whose nodes join: scripted nodes in memory, the real fleet, on a clock that only tests move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gateway.fleet.drain import Drainer
from gateway.fleet.forecast import Forecast
from gateway.fleet.live import Fleet, FleetModel
from gateway.fleet.members import Members
from gateway.fleet.state import Decision, FleetPolicy
from gateway.joins import Joins
from gateway.mesh_view import MeshView
from shared.mesh_access import MeshAccess
from shared.messages import MachineInfo
from shared.planning.fleet import Demand
from tests.support.fleet_world import facts
from tests.support.memory_mesh import NUM_LAYERS, ScriptedMesh, scripted_mesh
from tests.support.scripted_joiner import JoiningNode, create_joining
from tests.support.scripted_node import MODEL


@dataclass
class LiveFleet:
    """What a test works with."""

    mesh: ScriptedMesh
    joins: Joins
    fleet: Fleet
    drainer: Drainer

    def join(self, node_id: str, **options: Any) -> JoiningNode:
        """Let a node join, and again whenever it has lost its link."""
        node = create_joining(node_id, NUM_LAYERS, self.mesh.clock, **options)
        self.mesh.nodes.append(node)
        node.join(self.joins)
        return node

    def held(self) -> dict[str, str]:
        """What each connected node serves."""
        return {info.node: str(info.layers) for info in self.mesh.mesh.nodes() if info.state == "ready"}

    async def until_ready(self) -> None:
        """Wait until a full route exists."""
        await self.mesh.until(self.mesh.view.ready)


async def _inline(decide: Callable[..., Decision], *values: Any) -> Decision:
    return decide(*values)


def machine(layers: int = 3, layer_ms: float = 1.0) -> MachineInfo:
    """One with room for so many of the model's layers."""
    return MachineInfo(memory_bytes=layers * 1_000 + 250, read_bytes_per_s=round(1_000 / layer_ms * 1000))


@asynccontextmanager
async def live_fleet(cuts: tuple[str, ...] = (), **policy: Any) -> AsyncIterator[LiveFleet]:
    """A running fleet; `cuts` are nodes that are dialled and whose ranges are given."""
    async with scripted_mesh(cuts, route_wait_s=60.0) as mesh:
        clock, generator = mesh.clock, mesh.generator
        rules = FleetPolicy(**policy)
        forecast = Forecast(facts=facts(NUM_LAYERS), demand=Demand(sessions=1, context_len=16))
        members = Members(
            mesh=mesh.mesh,
            model=MODEL,
            num_layers=NUM_LAYERS,
            grace_s=rules.grace_s,
            clock=clock,
            work=forecast.work,
        )
        fleet = Fleet(
            mesh=mesh.mesh,
            members=members,
            model=FleetModel(fingerprint=MODEL, name="scripted", num_layers=NUM_LAYERS, files="/files"),
            forecast=forecast,
            policy=rules,
            is_idle=lambda: not generator.admission.active and not generator.admission.queued,
            clock=clock,
            offload=_inline,
        )
        joins = Joins(mesh.mesh, gateway_id="gateway", model=MODEL, access=MeshAccess(), clock=clock)
        drainer = Drainer(
            mesh=mesh.mesh,
            members=members,
            admission=generator.admission,
            clock=clock,
            pending=lambda: fleet.pending,
        )
        mesh.view = MeshView(mesh.mesh, generator, clock=clock, fleet=fleet)
        running = asyncio.create_task(fleet.run())
        try:
            yield LiveFleet(mesh, joins, fleet, drainer)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
