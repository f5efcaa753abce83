"""The planner: machines, a model and a demand in, ranges and predictions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shared.errors import MeshError
from shared.layers import LayerRange
from shared.models.facts import ModelFacts
from shared.planning.bounds import least_bottleneck_s, least_latency_s
from shared.planning.chain import Chain, bottleneck_of, latency_of
from shared.planning.cost import GATEWAY_TOKEN_S, CostModel, StageCost
from shared.planning.fleet import Demand, Machine, Objective
from shared.planning.impossible import why_impossible
from shared.planning.replicas import choose_replicas, effective_busy_s
from shared.planning.search import Found, find_placements

MACHINES_MAX = 512
"""More than a model has layers; a plan of so many still takes seconds only."""


class PlanImpossible(MeshError):
    """No plan exists: `too_little_memory`, `too_many_machines`, `duplicate_machine`, `no_machines`."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A machine with a range, and what the range costs there."""

    machine: Machine
    layers: LayerRange
    cost: StageCost


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One hop of the route.

    Args:
        primary: The machine that the route was planned through.
        replicas: Others with the same range, between which sessions are shared evenly.
    """

    primary: Copy
    replicas: tuple[Copy, ...] = ()

    @property
    def copies(self) -> tuple[Copy, ...]:
        """All machines with this range."""
        return (self.primary, *self.replicas)

    @property
    def busy_s(self) -> float:
        """How often the copies together take a token, when sessions are shared evenly."""
        return effective_busy_s([copy.cost.busy_s for copy in self.copies])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which machine holds what, and what that should give.

    Args:
        objective: What was minimized.
        demand: What it was planned for.
        stages: The route's hops, in order.
        left_out: Machines that hold nothing.
        chain: The problem that was solved.
        found: The plan's route.
        best_found: The best route that was found by the objective alone; another one than the plan's where that
            leaves machines over for replicas and so is better in all.
    """

    objective: Objective
    demand: Demand
    stages: tuple[PlannedStage, ...]
    left_out: tuple[Machine, ...]
    chain: Chain
    found: Found
    best_found: Found

    @property
    def is_optimal(self) -> bool:
        """Whether no other route is better by the objective, replicas apart."""
        return self.found is self.best_found and self.found.is_optimal

    @property
    def bound_s(self) -> float:
        """What no route without replicas can beat: time per token for `latency`, slowest stage for `throughput`."""
        best, chain = self.best_found, self.chain
        if self.objective == "latency":
            return GATEWAY_TOKEN_S + (latency_of(chain, best.placement) if best.is_optimal else least_latency_s(chain))
        slowest_s = bottleneck_of(chain, best.placement)
        return slowest_s if best.is_optimal else least_bottleneck_s(chain, slowest_s)

    @property
    def token_s(self) -> float:
        """Time between two tokens of one answer alone in the fleet, on the stages' primaries."""
        return GATEWAY_TOKEN_S + sum(stage.primary.cost.latency_s for stage in self.stages)

    @property
    def slowest_s(self) -> float:
        """Time of the slowest stage, its copies taken together."""
        return max(stage.busy_s for stage in self.stages)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one answer alone in the fleet."""
        return 1 / self.token_s

    @property
    def total_tokens_per_s(self) -> float:
        """Tokens per second of all sessions together: bounded by their own pace and by the slowest stage."""
        pace = self.demand.sessions * self.tokens_per_s
        return min(pace, 1 / self.slowest_s) if self.slowest_s else pace

    @property
    def ttft_s(self) -> float | None:
        """Time to first token of the demand's prompt on an idle fleet; None where a prefill time is unknown."""
        parts = [stage.primary.cost.prefill_s for stage in self.stages]
        known = [part for part in parts if part is not None]
        return GATEWAY_TOKEN_S + sum(known) if len(known) == len(parts) else None


def plan_fleet(
    model: ModelFacts,
    machines: Sequence[Machine],
    demand: Demand,
    objective: Objective = "latency",
    *,
    replicas: bool = True,
    variants: Mapping[str, ModelFacts] | None = None,
) -> Plan:
    """Place a model's layers on machines.

    Args:
        model: As machines hold it that do not say otherwise.
        machines: Who may hold a range.
        demand: What they are to serve.
        objective: What to minimize.
        replicas: Whether machines left over may hold second copies.
        variants: The model as machines of another `precision` hold it.

    Raises:
        PlanImpossible: They cannot hold it; says what is missing.
    """
    _check(machines)
    costs = CostModel(model, demand, variants or {})
    chain = costs.chain(machines)
    candidates = find_placements(chain, objective)
    if not candidates:
        raise PlanImpossible("too_little_memory", why_impossible(costs, machines, chain))
    if not replicas:
        candidates = candidates[:1]
    plans = [_plan(costs, machines, chain, found, objective, replicas=replicas) for found in candidates]
    best = plans[0] if objective == "latency" else min(plans, key=lambda plan: (plan.slowest_s, plan.token_s))
    return replace(best, best_found=candidates[0])


def _plan(
    costs: CostModel, machines: Sequence[Machine], chain: Chain, found: Found, objective: Objective, *, replicas: bool
) -> Plan:
    """Turn a route into a plan, with replicas on machines that it leaves over."""
    helpers = choose_replicas(chain, found.placement, objective) if replicas else {}

    def copy_of(node: int, layers: LayerRange) -> Copy:
        return Copy(machines[node], layers, costs.stage(machines[node], layers))

    stages = []
    for index, item in enumerate(found.placement):
        layers = LayerRange(chain.cuts[item.start], chain.cuts[item.end])
        others = tuple(copy_of(node, layers) for node in helpers.get(index, []))
        stages.append(PlannedStage(copy_of(item.node, layers), others))
    used = {copy.machine.name for stage in stages for copy in stage.copies}
    return Plan(
        objective=objective,
        demand=costs.demand,
        stages=tuple(stages),
        left_out=tuple(machine for machine in machines if machine.name not in used),
        chain=chain,
        found=found,
        best_found=found,
    )


def _check(machines: Sequence[Machine]) -> None:
    if not machines:
        raise PlanImpossible("no_machines", "a plan needs at least one machine")
    if len(machines) > MACHINES_MAX:
        message = f"at most {MACHINES_MAX} machines can be planned for, not {len(machines)}"
        raise PlanImpossible("too_many_machines", message, machines=len(machines), machines_max=MACHINES_MAX)
    names = [machine.name for machine in machines]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PlanImpossible("duplicate_machine", f"two machines are called {twice!r}", name=twice)
