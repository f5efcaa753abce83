"""What plans of a live fleet are made for."""

from __future__ import annotations

from dataclasses import dataclass

from shared.planning.fleet import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """What flags say of plans.

    Args:
        sessions: Answers in the making at once, each with a cache on every hop.
        context_len: Positions that each may reach; None for 4,096, or the model's if that is less.
        objective: What to minimize.
    """

    sessions: int = 8
    context_len: int | None = None
    objective: Objective = "latency"
