"""Why a plan is as it is: a sentence for every machine, whether it holds a range, stands in for one, or is left out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shared.planning.chain import MIDDLE, Placed, Placement, bottleneck_of, latency_of
from shared.planning.cost import GATEWAY_TOKEN_S
from shared.planning.fleet import Machine
from shared.planning.plan import Copy, Plan, PlannedStage
from shared.planning.replicas import SLOWDOWN_MAX, able_stages
from shared.planning.search import choose_search
from shared.planning.units import duration_text, size_text


def why_stage(plan: Plan, index: int) -> str:
    """Why a stage's machine holds its range and no more."""
    machine = plan.stages[index].primary.machine
    pace = f"{_rank(plan, machine)}, {duration_text(machine.decode_s_per_layer)} a layer"
    return f"{pace}; {_why_no_more(plan, index)}"


def why_replica(plan: Plan, stage: PlannedStage, replica: Copy) -> str:
    """What a second copy is good for, and what an answer over it costs."""
    slower = replica.cost.latency_s - stage.primary.cost.latency_s
    token = duration_text(plan.token_s + slower)
    good = f"takes over when {stage.primary.machine.name} is lost and shares its sessions"
    return f"{good}; a token over it takes {token}"


def why_left_out(plan: Plan, machines: Sequence[Machine], machine: Machine) -> str:
    """What keeps a machine out: its memory, or what a token would take with it."""
    node = next(index for index, other in enumerate(machines) if other.name == machine.name)
    terms = plan.chain.nodes[node]
    room = terms.room_bytes[MIDDLE]
    smallest = min(after - before for before, after in pairwise(terms.bytes_before))
    if room < smallest:
        return (
            f"too little memory: {size_text(max(0, room))} are left for layers, and the smallest piece takes "
            f"{size_text(smallest)} with its caches"
        )
    search, _ = choose_search(plan.chain)
    forced = search.fastest(plan.found.busy_limit_s, required=node)
    return f"{_cost_of_using(plan, machine, forced)}; {_why_no_replica(plan, node)}"


def _rank(plan: Plan, machine: Machine) -> str:
    speeds = sorted(node.per_work_s for node in plan.chain.nodes)
    rank = speeds.index(machine.decode_s_per_layer) + 1
    return "the fastest" if rank == 1 else f"number {rank} of {len(speeds)} by speed"


def _why_no_more(plan: Plan, index: int) -> str:
    """What bounds a stage's range: the model, its memory, the slowest stage, or nothing but its price."""
    placement, chain = plan.found.placement, plan.chain
    item = placement[index]
    if len(placement) == 1:
        return "holds the whole model, so that there is only one hop"
    grown = [Placed(item.node, item.start, item.end + 1)] if item.end < chain.num_segments else []
    grown += [Placed(item.node, item.start - 1, item.end)] if item.start else []
    if not any(chain.fits(piece.node, piece.start, piece.end) for piece in grown):
        return "holds what its memory takes"
    limit = plan.found.busy_limit_s
    if all(chain.busy_s(piece.node, piece.start, piece.end) > limit for piece in grown):
        return "one piece more would make it the slowest stage"
    return "has memory for more, which others hold at less or equal cost"


def _cost_of_using(plan: Plan, machine: Machine, forced: Placement | None) -> str:
    token = duration_text(plan.token_s)
    hop = duration_text(machine.hop_overhead_s + machine.rtt_s)
    if forced is None:
        slowest = duration_text(bottleneck_of(plan.chain, plan.found.placement))
        return f"one piece of the model here would be a slower stage than the slowest now ({slowest})"
    with_it = duration_text(latency_of(plan.chain, forced) + GATEWAY_TOKEN_S)
    verb = "would take" if plan.objective == "latency" else "would gain nothing at the slowest stage and take"
    pace = duration_text(machine.decode_s_per_layer)
    return f"with it a token {verb} {with_it}, without it {token}: its hop costs {hop}, each layer {pace}"


def _why_no_replica(plan: Plan, node: int) -> str:
    placement, precision = plan.found.placement, plan.chain.nodes[node].precision
    if not any(plan.chain.nodes[item.node].precision == precision for item in placement):
        return f"and no other machine computes in {precision}, so that it could be a replica"
    if not any(plan.chain.fits(node, item.start, item.end) for item in placement):
        return "and no other machine's range fits its memory, to be its replica"
    if not able_stages(plan.chain, placement, node):
        return f"and as a replica it would make a token take over {SLOWDOWN_MAX:g} times as long"
    return "and it is not needed as a replica"
