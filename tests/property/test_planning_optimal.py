"""The planner against brute force: every choice and order of machines, every cut of the model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from shared.layers import LayerRange
from shared.models.facts import LayerFacts, ModelFacts, SlotFacts
from shared.planning.chain import RELATIVE_SLACK, Chain, Placement, bottleneck_of, latency_of
from shared.planning.cost import GATEWAY_TOKEN_S, CostModel, StageCost
from shared.planning.fleet import Demand, Machine, Objective
from shared.planning.ordered import OrderedSearch
from shared.planning.plan import PlanImpossible, plan_fleet
from shared.planning.search import NO_LIMIT, find_placements

MACHINES_MAX, LAYERS_MAX = 4, 6
CLOSE = 1e-6
"""Relative; far above what the searches allow themselves."""


@st.composite
def machines(draw: st.DrawFn) -> list[Machine]:
    """Fast and slow, roomy and tight, near and far; some of them alike."""
    times = st.sampled_from([0.0005, 0.001, 0.0017, 0.004, 0.02])
    kinds = [
        {
            "memory_bytes": draw(st.integers(20, 900)),
            "decode_s_per_layer": draw(times),
            "head_s": draw(st.none() | times),
            "rtt_s": draw(st.sampled_from([0.0, 0.0003, 0.004, 0.03])),
            "bytes_per_s": draw(st.sampled_from([1e5, 1e6, float("inf")])),
            "hop_overhead_s": draw(st.sampled_from([0.0, 0.0015])),
            "runtime_bytes": 10,
        }
        for _ in range(draw(st.integers(1, MACHINES_MAX)))
    ]
    picked = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=MACHINES_MAX))
    return [Machine(name=f"m{index}", **kind) for index, kind in enumerate(picked)]


def _layers(sizes: list[int]) -> tuple[LayerFacts, ...]:
    return tuple(LayerFacts(size, size, SlotFacts(bytes_per_token=1)) for size in sizes)


@st.composite
def models(draw: st.DrawFn, *, uniform: bool) -> ModelFacts:
    """With heavy ends; where not uniform, layers of unlike size and boundaries that may not be cut."""
    count = draw(st.integers(1, LAYERS_MAX))
    size = st.integers(10, 120)
    sizes = [draw(size)] * count if uniform else draw(st.lists(size, min_size=count, max_size=count))
    is_tied = draw(st.booleans())
    embedding = draw(st.integers(0, 150))
    cuts = [] if uniform or count == 1 else draw(st.lists(st.integers(1, count - 1), max_size=2))
    return ModelFacts(
        layers=_layers(sizes),
        embedding_bytes=embedding,
        head_bytes=embedding if is_tied else draw(st.integers(0, 150)),
        is_tied=is_tied,
        shared_bytes=draw(st.integers(0, 10)),
        hidden_bytes=draw(st.sampled_from([0, 64, 4096])),
        forbidden_cuts=frozenset(cuts),
    )


DEMANDS = st.builds(Demand, sessions=st.integers(1, 3), context_len=st.integers(1, 8), prompt_len=st.just(1))


def every_route(costs: CostModel, fleet: list[Machine]) -> Iterator[list[StageCost]]:
    """The stages of every route that fits, straight from the cost of one range on one machine."""
    model = costs.model
    inner = [cut for cut in range(1, model.num_layers) if cut not in model.forbidden_cuts]
    for hops in range(1, min(len(fleet), len(inner) + 1) + 1):
        for cuts in combinations(inner, hops - 1):
            ranges = [LayerRange(a, b) for a, b in pairwise([0, *cuts, model.num_layers])]
            for order in permutations(fleet, hops):
                stages = [costs.stage(machine, layers) for machine, layers in zip(order, ranges, strict=True)]
                if all(stage.free_bytes >= 0 for stage in stages):
                    yield stages


def brute_force(costs: CostModel, fleet: list[Machine]) -> tuple[float, float, float] | None:
    """The least time per token, the least slowest stage, and the least time per token with that; None without route."""
    routes = [
        (sum(stage.latency_s for stage in stages), max(stage.busy_s for stage in stages))
        for stages in every_route(costs, fleet)
    ]
    if not routes:
        return None
    slowest = min(busy for _, busy in routes)
    steady = min(latency for latency, busy in routes if busy <= slowest * (1 + CLOSE))
    return min(latency for latency, _ in routes), slowest, steady


def check_optimal(model: ModelFacts, fleet: list[Machine], demand: Demand, objective: Objective) -> None:
    """The plan is as good as the best of all routes, and exists if any does."""
    expected = brute_force(CostModel(model, demand), fleet)
    event(f"a route exists: {expected is not None}")
    if expected is None:
        with pytest.raises(PlanImpossible):
            plan_fleet(model, fleet, demand, objective)
        return
    plan = plan_fleet(model, fleet, demand, objective, replicas=False)
    event(f"hops: {len(plan.stages)}")
    assert plan.is_optimal
    assert all(stage.primary.cost.free_bytes >= 0 for stage in plan.stages)
    assert len({stage.primary.machine.name for stage in plan.stages}) == len(plan.stages)
    latency, slowest, steady = expected
    if objective == "latency":
        assert plan.token_s - GATEWAY_TOKEN_S == pytest.approx(latency, rel=CLOSE)
    else:
        assert plan.slowest_s == pytest.approx(slowest, rel=CLOSE, abs=1e-12)
        assert plan.token_s - GATEWAY_TOKEN_S <= steady * (1 + CLOSE)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@settings(max_examples=150)
@given(model=models(uniform=True), fleet=machines(), demand=DEMANDS)
def test_a_plan_of_like_layers_is_optimal(
    objective: Objective, model: ModelFacts, fleet: list[Machine], demand: Demand
):
    """Exact with any memory, links, ends and speeds, for both objectives."""
    check_optimal(model, fleet, demand, objective)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@settings(max_examples=150)
@given(model=models(uniform=False), fleet=machines(), demand=DEMANDS)
def test_a_plan_of_unlike_layers_on_few_machines_is_optimal(
    objective: Objective, model: ModelFacts, fleet: list[Machine], demand: Demand
):
    """As above, with layers of unlike size and boundaries that may not be cut."""
    check_optimal(model, fleet, demand, objective)


def _is_valid(chain: Chain, placement: Placement) -> bool:
    ends = [0, *(item.end for item in placement)]
    fits = all(chain.fits(item.node, item.start, item.end) for item in placement)
    return fits and [item.start for item in placement] == ends[:-1] and ends[-1] == chain.num_segments


@settings(max_examples=150)
@given(model=models(uniform=False), fleet=machines(), demand=DEMANDS)
def test_the_bounded_search_gives_valid_routes_between_its_bound_and_the_optimum(
    model: ModelFacts, fleet: list[Machine], demand: Demand
):
    """What large fleets get is never invalid, never better than the optimum, which is never below the bound."""
    from shared.planning.bounds import least_bottleneck_s, least_latency_s

    costs = CostModel(model, demand)
    chain = costs.chain(fleet)
    expected = brute_force(costs, fleet)
    found = OrderedSearch(chain).fastest()
    if expected is None or found is None:
        assert found is None
        return
    latency, slowest, _ = expected
    assert _is_valid(chain, found)
    event(f"found the optimum: {latency_of(chain, found) <= latency * (1 + CLOSE)}")
    assert latency * (1 - CLOSE) <= latency_of(chain, found)
    search = OrderedSearch(chain)
    limit = search.least_limit(bottleneck_of(chain, found)) * (1 + RELATIVE_SLACK)
    steady = search.fastest(limit)
    assert steady is not None
    assert _is_valid(chain, steady)
    assert slowest * (1 - CLOSE) <= bottleneck_of(chain, steady) <= limit
    assert least_latency_s(chain) <= latency * (1 + CLOSE)
    assert least_bottleneck_s(chain, bottleneck_of(chain, found)) <= slowest * (1 + CLOSE)


@settings(max_examples=100)
@given(model=models(uniform=False) | models(uniform=True), fleet=machines(), demand=DEMANDS, data=st.data())
def test_a_required_machine_is_on_the_route_at_least_cost(
    model: ModelFacts, fleet: list[Machine], demand: Demand, data: st.DataObject
):
    """What the explanation of a machine left out compares with is the best route through it."""
    from shared.planning.search import choose_search

    costs = CostModel(model, demand)
    chain = costs.chain(fleet)
    node = data.draw(st.integers(0, len(fleet) - 1))
    found = choose_search(chain)[0].fastest(NO_LIMIT, node)
    best = min(_latencies_through(costs, fleet, node), default=None)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert node in [item.node for item in found]
    assert _is_valid(chain, found)
    assert latency_of(chain, found) == pytest.approx(best, rel=CLOSE)


def _latencies_through(costs: CostModel, fleet: list[Machine], node: int) -> Iterator[float]:
    inner = [cut for cut in range(1, costs.model.num_layers) if cut not in costs.model.forbidden_cuts]
    for hops in range(1, min(len(fleet), len(inner) + 1) + 1):
        for cuts in combinations(inner, hops - 1):
            ranges = [LayerRange(a, b) for a, b in pairwise([0, *cuts, costs.model.num_layers])]
            for order in permutations(range(len(fleet)), hops):
                stages = [costs.stage(fleet[index], layers) for index, layers in zip(order, ranges, strict=True)]
                if node in order and all(stage.free_bytes >= 0 for stage in stages):
                    yield sum(stage.latency_s for stage in stages)


@settings(max_examples=100)
@given(model=models(uniform=True), fleet=machines(), demand=DEMANDS)
def test_replicas_fit_and_never_slow_the_slowest_stage(model: ModelFacts, fleet: list[Machine], demand: Demand):
    """With replicas, throughput is at least what it is without, and no machine is used twice or over its memory."""
    if not find_placements(CostModel(model, demand).chain(fleet), "throughput"):
        return
    bare = plan_fleet(model, fleet, demand, "throughput", replicas=False)
    full = plan_fleet(model, fleet, demand, "throughput")
    copies = [copy for stage in full.stages for copy in stage.copies]
    names = [copy.machine.name for copy in copies] + [machine.name for machine in full.left_out]
    assert full.slowest_s <= bare.slowest_s * (1 + CLOSE)
    assert all(copy.cost.free_bytes >= 0 for copy in copies)
    assert sorted(names) == sorted(machine.name for machine in fleet)
