"""What machines would make of the model: the planner's figures for what live nodes say of themselves. Pure.

A node holds the model in an element type of its own, quantized or not, and what a range takes there is the sum that the
node itself will take: so there are facts of the model for each of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gateway.fleet.cover import gaps
from gateway.fleet.state import FixedNode, Member
from shared.layers import LayerRange
from shared.messages import MachineInfo
from shared.models.facts import ModelFacts
from shared.options import QUANTIZE_NONE
from shared.planning.cost import GATEWAY_TOKEN_S, CostModel, StageCost
from shared.planning.fleet import Demand, Machine, Objective
from shared.planning.plan import Plan, PlanImpossible, plan_fleet
from shared.planning.replicas import SLOWDOWN_MAX, effective_busy_s

Ranges = Mapping[str, LayerRange]
"""Node → what it is to hold."""
_CostKey = tuple[MachineInfo, float, float | None, float | None, LayerRange]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a fleet should give.

    Args:
        token_s: Between two tokens of one answer alone.
        slowest_s: How often the slowest stage takes a token.
        first_token_s: After the demand's prompt, on an idle fleet; None where that of some hop is not known.
    """

    token_s: float
    slowest_s: float
    first_token_s: float | None

    def rate(self, objective: Objective) -> float:
        """Tokens per second that plans are compared by."""
        return 1 / (self.token_s if objective == "latency" else self.slowest_s)


@dataclass(slots=True)
class Forecast:
    """Plans for one model and one demand.

    Args:
        facts: The model, plain, in the element type that it is stored in.
        demand: What the fleet is to serve.
        objective: What plans minimize.
        variants: The model as nodes hold it, by their precision: as in `NodeInfo`, such as ``bf16`` or ``bf16/int8``.
        stored: Precision of `facts`.
    """

    facts: ModelFacts
    demand: Demand
    objective: Objective = "latency"
    variants: Mapping[str, ModelFacts] = field(default_factory=dict)
    stored: str = ""
    _plans: dict[object, Plan | str] = field(default_factory=dict)
    _costs: dict[_CostKey, StageCost] = field(default_factory=dict)

    def machine(self, member: Member) -> Machine:
        """A member as the planner sees it."""
        offered = member.machine
        plain = self.variants.get(self._dtype(member), self.facts)
        mean = plain.mean_active_bytes  # speeds count plain bytes
        prefill = offered.prefill_bytes_per_s
        return Machine(
            name=member.node,
            memory_bytes=max(1, offered.memory_bytes),
            runtime_bytes=offered.runtime_bytes,
            decode_s_per_layer=member.layer_s or max(1e-9, mean / max(1, offered.read_bytes_per_s)),
            prefill_s_per_layer_token=mean / prefill if prefill else None,
            rtt_s=rounded_rtt_s(member.rtt_s),
            bytes_per_s=member.bytes_per_s or float("inf"),
            precision=self.precision(member),
        )

    def precision(self, member: Member) -> str:
        """What decides how a member rounds, as in `NodeInfo`."""
        quantize, dtype = member.machine.quantize, self._dtype(member)
        return dtype if quantize == QUANTIZE_NONE else f"{dtype}/{quantize}"

    def _dtype(self, member: Member) -> str:
        return member.machine.dtype or self.stored

    def cost(self, member: Member, layers: LayerRange) -> StageCost:
        """What a range costs a member."""
        key = (member.machine, rounded_rtt_s(member.rtt_s), member.bytes_per_s, member.layer_s, layers)
        cost = self._costs.get(key)
        if cost is None:
            if len(self._costs) >= COSTS_KEPT_MAX:
                self._costs.clear()
            cost = self._costs[key] = self._cost_model.stage(self.machine(member), layers)
        return cost

    def work(self, layers: LayerRange) -> float:
        """What a decode step over a range is, its head included, in average layers."""
        costs = CostModel(self.facts, self.demand)
        work = sum(map(costs.layer_work, self.facts.layers[layers.start : layers.end]))
        mean = self.facts.mean_active_bytes
        return work + (self.facts.head_bytes / mean if layers.end == self.facts.num_layers and mean else 0.0)

    @property
    def _cost_model(self) -> CostModel:
        return CostModel(self.facts, self.demand, self.variants)

    def fits(self, member: Member, layers: LayerRange) -> bool:
        """Whether a member has the memory for a range, and has not failed to load it."""
        return layers not in member.failed and self.cost(member, layers).free_bytes >= 0

    def fill(
        self, members: Sequence[Member], kept: Sequence[LayerRange], refused_cuts: frozenset[int]
    ) -> dict[str, LayerRange]:
        """Ranges for members such that all layers are covered.

        Where the kept ranges leave several gaps, each is planned in turn, the largest first, from who is left.

        Args:
            members: Who may be given a range.
            kept: In order, without overlap: what others hold and go on holding.
            refused_cuts: Where the model cannot be cut.

        Raises:
            PlanImpossible: They cannot hold what is missing.
        """
        ranges: dict[str, LayerRange] = {}
        missing = sorted(gaps(kept, self.facts.num_layers), key=len, reverse=True)
        for number, gap in enumerate(missing):
            free = [member for member in members if member.node not in ranges]
            # What serves only one answer fastest leaves most machines for the gaps to come.
            objective = self.objective if number == len(missing) - 1 else "latency"
            plan = self._plan_gap(free, gap, refused_cuts, objective, replicas=number == len(missing) - 1)
            for stage in plan.stages:
                layers = LayerRange(stage.primary.layers.start + gap.start, stage.primary.layers.end + gap.start)
                ranges.update({copy.machine.name: layers for copy in stage.copies})
        return ranges

    def predict(self, members: Sequence[Member], ranges: Ranges, fixed: Sequence[FixedNode]) -> Prediction | None:
        """What ranges should give; None where they do not cover all layers, or a fixed node was never measured."""
        stages: dict[LayerRange, list[_Times]] = {}
        for member in members:
            if layers := ranges.get(member.node):
                cost = self.cost(member, layers)
                stages.setdefault(layers, []).append(_Times(cost.latency_s, cost.busy_s, cost.prefill_s))
        for node in fixed:
            if node.token_s is not None:
                stages.setdefault(node.layers, []).append(_Times(node.token_s, node.token_s, None))
        return _best_route(stages, self.facts.num_layers)

    def replica_for(
        self, spare: Member, members: Sequence[Member], ranges: Ranges, fixed: Sequence[FixedNode]
    ) -> LayerRange | None:
        """The range of the plan that a spare member should hold as well, if one is worth it.

        As `shared.planning.replicas` chooses: it must not make a token take much longer; for `latency` the range with
        the fewest copies, for `throughput` the slowest one, and only if that becomes faster. Only a range that is held
        in the spare member's own precision: answers never move to another.
        """
        stages: dict[LayerRange, list[StageCost]] = {}
        alike: set[LayerRange] = set()
        for member in members:
            if layers := ranges.get(member.node):
                stages.setdefault(layers, []).append(self.cost(member, layers))
                if self.precision(member) == self.precision(spare):
                    alike.add(layers)
        for node in fixed:
            stages.setdefault(node.layers, [])
            if node.precision == self.precision(spare):
                alike.add(node.layers)
        token_s = GATEWAY_TOKEN_S + sum(min(_latencies_s(costs), default=0.0) for costs in stages.values())
        options = []
        for layers, costs in stages.items():
            own = self.cost(spare, layers)
            slower_s = own.latency_s - min(_latencies_s(costs), default=own.latency_s)
            if layers not in alike or not self.fits(spare, layers) or slower_s > (SLOWDOWN_MAX - 1) * token_s:
                continue
            busy_s = [cost.busy_s for cost in costs]
            pace_s = effective_busy_s(busy_s) if busy_s else 0.0
            if self.objective == "latency":
                options.append((len(busy_s), -pace_s, layers))
            elif busy_s and effective_busy_s([*busy_s, own.busy_s]) < pace_s:
                options.append((0, -pace_s, layers))
        return min(options)[2] if options else None

    def _plan_gap(
        self,
        members: Sequence[Member],
        gap: LayerRange,
        refused_cuts: frozenset[int],
        objective: Objective,
        *,
        replicas: bool,
    ) -> Plan:
        machines = tuple(self.machine(member) for member in members)
        key = (machines, gap, refused_cuts, objective, replicas)
        if key not in self._plans:
            if len(self._plans) >= PLANS_KEPT_MAX:
                self._plans.clear()
            try:
                self._plans[key] = plan_fleet(
                    part_of(self.facts, gap, refused_cuts),
                    machines,
                    self.demand,
                    objective,
                    replicas=replicas,
                    variants={
                        precision: part_of(self.variants[precision], gap, refused_cuts)
                        for precision in {machine.precision for machine in machines} & self.variants.keys()
                    },
                )
            except PlanImpossible as error:
                self._plans[key] = f"{error.code}: {error.message}"
        plan = self._plans[key]
        if isinstance(plan, str):
            code, _, message = plan.partition(": ")
            raise PlanImpossible(code, message)
        return plan


PLANS_KEPT_MAX = 64
"""Plans remembered, so that a fleet in which nothing happens is not planned for again and again."""
COSTS_KEPT_MAX = 16_384
"""Of a few hundred machines, each with the ranges that a plan has."""
RTT_STEP_S = 0.0005
"""Round trips are told apart by so much, so that a plan does not follow every heartbeat."""


def rounded_rtt_s(rtt_s: float) -> float:
    """A round trip as plans take it."""
    return round(rtt_s / RTT_STEP_S) * RTT_STEP_S


def part_of(facts: ModelFacts, layers: LayerRange, refused_cuts: frozenset[int]) -> ModelFacts:
    """A stretch of the model as a model of its own; its ends come with it only where it has them."""
    is_first, is_last = layers.start == 0, layers.end == facts.num_layers
    forbidden = facts.forbidden_cuts | refused_cuts
    return replace(
        facts,
        layers=facts.layers[layers.start : layers.end],
        embedding_bytes=facts.embedding_bytes if is_first else 0,
        head_bytes=facts.head_bytes if is_last else 0,
        is_tied=facts.is_tied and is_first and is_last,
        forbidden_cuts=frozenset(cut - layers.start for cut in forbidden if layers.start < cut < layers.end),
    )


def _latencies_s(costs: Sequence[StageCost]) -> list[float]:
    return [cost.latency_s for cost in costs]


@dataclass(frozen=True, slots=True)
class _Times:
    """What a hop takes: a token there and back, as a stage, and the demand's prompt where that is known."""

    latency_s: float
    busy_s: float
    prefill_s: float | None


def _best_route(stages: Mapping[LayerRange, list[_Times]], num_layers: int) -> Prediction | None:
    """The route with the fewest hops, as `gateway.registry` takes it; of a range's copies the fastest is counted."""
    best: dict[int, tuple[_Times, ...]] = {0: ()}
    for layers in sorted(stages):
        before = best.get(layers.start)
        if before is None:
            continue
        fastest = min(stages[layers], key=lambda times: times.latency_s)
        path = (*before, replace(fastest, busy_s=effective_busy_s([copy.busy_s for copy in stages[layers]])))
        if layers.end not in best or _order(path) < _order(best[layers.end]):
            best[layers.end] = path
    found = best.get(num_layers)
    if found is None:
        return None
    prefills = [hop.prefill_s for hop in found if hop.prefill_s is not None]
    return Prediction(
        token_s=GATEWAY_TOKEN_S + sum(hop.latency_s for hop in found),
        slowest_s=max(1e-9, *(hop.busy_s for hop in found)),
        first_token_s=GATEWAY_TOKEN_S + sum(prefills) if len(prefills) == len(found) else None,
    )


def _order(path: Sequence[_Times]) -> tuple[int, float]:
    return len(path), sum(hop.latency_s for hop in path)
