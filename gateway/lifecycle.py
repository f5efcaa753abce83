"""Where generations begin and end: their places, their journals, and what the nodes are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import structlog

from gateway.admission import Admission
from gateway.figures import Totals
from gateway.journal import Journal
from gateway.mesh import Mesh
from gateway.relay import Generation
from gateway.session import Session
from shared.clock import Clock
from shared.messages import Cancel, Release

Outcome = Literal["completed", "cancelled", "failed"]

log = structlog.stdlib.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Lifecycle:
    """The generations under way.

    Args:
        mesh: The nodes.
        admission: Has given every session its places.
        journal: Keeps what hops were given.
        clock: Time.
        failover_timeout_s: How long a hop may be without any node.
        totals: What was done so far.
        running: Generations under way, by session.
    """

    mesh: Mesh
    admission: Admission
    journal: Journal
    clock: Clock
    failover_timeout_s: float
    totals: Totals = field(default_factory=Totals)
    running: dict[str, Generation] = field(default_factory=dict)

    def begin(self, session: Session, *, request_id: str) -> Generation:
        """Start a generation whose session has been admitted; whoever does ends it."""
        generation = Generation(
            session,
            self.mesh,
            self.admission,
            self.journal,
            self.clock,
            self.failover_timeout_s,
            request_id,
            self.clock.monotonic(),
        )
        self.running[session.id] = generation
        self.admission.begin(session.id)
        self.totals.outcomes["started"] += 1
        route = [f"{hop.node}[{hop.layers}]" for hop in session.hops]
        log.debug("generation.started", session=session.id, request_id=request_id, route=route)
        return generation

    def end(self, generation: Generation, outcome: Outcome) -> None:
        """Free the session on every node and give its places back; nothing is waited for. Again does nothing.

        A completed one is released; otherwise what is being computed for it is cancelled.
        """
        session, figures = generation.session, generation.figures
        if self.running.pop(session.id, None) is None:
            return
        message = Release(session=session.id) if outcome == "completed" else Cancel(session=session.id)
        for node in generation.visited:
            self.mesh.post(node, message)
        session.close()
        self.totals.outcomes[outcome] += 1
        self.totals.add(figures)
        log.debug(
            "generation.ended",
            session=session.id,
            request_id=generation.request_id,
            outcome=outcome,
            passes=figures.passes,
            misses=dict(figures.misses),
            replays=figures.replays,
        )
        self.leave((session.id,), lasted_s=self.clock.monotonic() - generation.began_at)

    def leave(self, sessions: tuple[str, ...], *, lasted_s: float = 0.0) -> None:
        """Give back what places these sessions have, and let others have them."""
        for session in sessions:
            self.admission.release(session, lasted_s=lasted_s)
        self.mesh.announce()
