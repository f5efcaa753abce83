"""Waiting for a place on the mesh."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from gateway.admission import Admission, Admitted, Demand
from gateway.errors import AdmissionRefused, NotReady
from gateway.generation_settings import GenerationSettings
from gateway.mesh import Mesh
from gateway.needs import Needs
from gateway.registry import ANY, NoRoute, find_route
from gateway.waiting import wait_first
from shared.clock import Clock

log = structlog.stdlib.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class AdmissionQueue:
    """Who waits, and for how long.

    Args:
        mesh: The nodes.
        admission: Decides who may start.
        settings: Bounds.
        clock: Time.
    """

    mesh: Mesh
    admission: Admission
    settings: GenerationSettings
    clock: Clock
    _waiting: dict[str, asyncio.Future[Admitted]] = field(default_factory=dict, init=False)

    def admit(self) -> None:
        """Let those start whose turn it is; called whenever a place may have become free."""
        for admitted in self.admission.admit(self.mesh.nodes()):
            self._waiting.pop(admitted.demand.key).set_result(admitted)

    async def take(self, demand: Demand) -> Admitted:
        """Wait for a place. Who was admitted must release every session of the demand in the end.

        Raises:
            NotReady: There is no route.
            AdmissionRefused: There is no room.
        """
        turn: asyncio.Future[Admitted] = asyncio.get_running_loop().create_future()
        self.admission.enqueue(demand, self.mesh.nodes())
        with self._registered(demand, turn):
            self.admit()
            if not turn.done():
                log.info("generation.queued", session=demand.key, queued=self.admission.queued)
                await self._wait(turn, demand)
            return turn.result()

    @contextmanager
    def _registered(self, demand: Demand, turn: asyncio.Future[Admitted]) -> Iterator[None]:
        self._waiting[demand.key] = turn
        try:
            yield
        finally:
            self._waiting.pop(demand.key, None)
            self.admission.withdraw(demand)

    def missing_route(self, needs: Needs = ANY) -> str | None:
        """Why no route serves such a request; None when one does."""
        admission = self.admission
        route = find_route(self.mesh.nodes(), model=admission.model, num_layers=admission.num_layers, needs=needs)
        if not isinstance(route, NoRoute):
            return None
        idle = self.mesh.idle()
        reason = "no node holds any layers" if idle and not self.mesh.nodes() else route.reason
        return "; ".join([reason, *idle, *self.mesh.absences(), *self.mesh.refusals()])

    async def _wait(self, turn: asyncio.Future[Admitted], demand: Demand) -> None:
        queue_timeout_s, route_wait_s = self._limits_s(demand)
        started_at = self.clock.monotonic()
        missing_since: float | None = None
        while not turn.done():
            changed = self.mesh.changed
            now = self.clock.monotonic()
            missing = self.missing_route(demand.needs)
            if missing is None:
                missing_since = None
                route_wait_s = max(route_wait_s, self.settings.failover_timeout_s)  # what was there may come back
                left_s = started_at + queue_timeout_s - now
            else:
                missing_since = now if missing_since is None else missing_since
                left_s = missing_since + route_wait_s - now
            if left_s <= 0:
                raise self._overdue(missing, now - started_at)
            await wait_first(self.clock, left_s, turn, changed.wait())

    def _limits_s(self, demand: Demand) -> tuple[float, float]:
        """How long to wait for a place, and for a route.

        A request that has begun waits for its own sessions to end, which takes as long as they take, and for a node
        as long as a hop would. So does, for a node, one that waited already when the route was lost.
        """
        if demand.resumes:
            return math.inf, self.settings.failover_timeout_s
        return self.settings.queue_timeout_s, self.settings.route_wait_s

    def _overdue(self, missing: str | None, waited_s: float) -> NotReady | AdmissionRefused:
        if missing is not None:
            return NotReady("no_route", missing)
        message = f"no place became free within {waited_s:.0f} s"
        return AdmissionRefused("queue_timeout", message, retry_after_s=self.admission.retry_after_s())
