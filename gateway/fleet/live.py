"""The live fleet: looks at the nodes, asks `gateway.fleet.decide` what to do, and does it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from gateway.fleet.decide import decide
from gateway.fleet.forecast import Forecast
from gateway.fleet.members import Members
from gateway.fleet.state import Adopt, Decision, FleetPolicy, FleetState, LoadRange, Target, UnloadRange
from gateway.mesh import Mesh
from gateway.node_link import NodeLink
from gateway.waiting import wait_first
from shared.clock import Clock
from shared.errors import LinkClosed
from shared.messages import Load, Unload

TICK_S = 1.0
"""How often the fleet is looked at where nothing has happened."""
PAUSE_S = 0.25
"""Between two looks: a change is often followed by others, and every answer's end is one."""
CHANGES_AT_ONCE_MAX = 1024
"""Loads that are sent before the fleet is looked at again; more than it has members."""
Offload = Callable[..., Awaitable[Decision]]
log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetModel:
    """What the fleet serves.

    Args:
        fingerprint: The model's.
        name: What `--model` would name it by.
        num_layers: Its decoder layers.
        files: Path on this gateway below which nodes can read its files; None where it has none to give.
    """

    fingerprint: str
    name: str
    num_layers: int
    files: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Fleet:
    """Gives members their ranges. `run` does so until cancelled.

    Args:
        mesh: The nodes.
        members: Those that take any range, and what was said to them.
        model: What they serve.
        forecast: Plans for it; None where its sizes cannot be told, and nothing can be planned.
        policy: When plans may change.
        is_idle: Whether no answer is in the making, and none waits.
        clock: Time.
        offload: Runs a decision, which may take a while, beside the event loop.
    """

    mesh: Mesh
    members: Members
    model: FleetModel
    forecast: Forecast | None
    policy: FleetPolicy
    is_idle: Callable[[], bool]
    clock: Clock
    offload: Offload = asyncio.to_thread
    target: Target | None = field(default=None, init=False)
    pending: str = field(default="", init=False)
    _improved_at: float = field(default=float("-inf"), init=False)

    def state(self) -> FleetState:
        """The fleet as it is now."""
        members, fixed = self.members.look()
        return FleetState(
            now_s=self.clock.monotonic(),
            num_layers=self.model.num_layers,
            members=members,
            fixed=fixed,
            refused_cuts=frozenset(self.members.refused_cuts),
            target=self.target,
            is_idle=self.is_idle(),
            improved_at=self._improved_at,
        )

    async def run(self) -> None:
        """Keep the fleet as it should be until cancelled."""
        while True:
            changed = self.mesh.changed
            try:
                await self._step()
            except Exception:
                log.exception("fleet.step_failed")
            await self.clock.sleep(PAUSE_S)
            await wait_first(self.clock, TICK_S, changed.wait())

    async def _step(self) -> None:
        if self.forecast is None:
            self._note_pending("the sizes of this model's layers cannot be told from its files")
            return
        for _ in range(CHANGES_AT_ONCE_MAX):
            decision = await self.offload(decide, self.state(), self.forecast, self.policy)
            self._note_pending(decision.pending)
            if decision.change is None:
                return
            self._apply(decision)

    def _note_pending(self, pending: str) -> None:
        if pending and pending != self.pending:
            log.info("plan.pending", reason=pending)
        self.pending = self.mesh.plan_pending = pending

    def _apply(self, decision: Decision) -> None:
        match decision.change:
            case Adopt(target, for_speed):
                self.target = target
                if for_speed:
                    self._improved_at = self.clock.monotonic()
                ranges = {node: str(layers) for node, layers in sorted(target.ranges.items())}
                log.info("plan.adopted", reason=target.reason, ranges=ranges)
            case LoadRange(node, layers):
                load = Load(
                    layers=layers,
                    model=self.model.fingerprint,
                    model_name=self.model.name,
                    num_layers=self.model.num_layers,
                    files=self.model.files,
                )
                if self._direct(self.members.link(node), load):
                    self.members.note_load(node, layers)
            case UnloadRange(node):
                self._direct(self.members.link(node), Unload())

    def _direct(self, link: NodeLink | None, message: Load | Unload) -> bool:
        """Tell a node; False when it has gone in the meantime, which the next look will see."""
        if link is None or not link.is_open:
            return False
        try:
            link.direct(message)
        except LinkClosed:
            return False
        fields: dict[str, Any] = {"layers": str(message.layers)} if isinstance(message, Load) else {}
        log.info("node.directed", node=link.node, to=message.kind, **fields)
        return True
