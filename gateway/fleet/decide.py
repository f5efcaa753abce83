"""What to do about the fleet now: at most one change. Pure.

Theory of operation. A *target* says what each member is to hold; it outlives the members' links. Three questions are
asked in this order, and the first that has an answer gives the change:

1. Does the target still cover all layers with members and fixed nodes that can be counted on (not leaving, not lost for
   longer than the grace, able to load their range)? If not, a new one is *needed*: the ranges that are held stay, and
   what is missing is given to members that are free; only where that is impossible is everything planned anew. One that
   has been lost for a moment is waited for, but members that can be spared take its layers before the grace is over.
2. Does each member that is here hold what the target says? If not, one that does not is told to *load*: first those
   that serve nothing, then those without whom the ranges that are served still cover all layers. What would interrupt
   answers waits until there are none.
3. Is there something *better*: a plan that promises enough more to be worth the change, a spare member that can stand
   in for another, or one that holds what nobody needs?
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from gateway.fleet.cover import best_chain, covers
from gateway.fleet.forecast import Forecast, Ranges
from gateway.fleet.state import (
    DEFAULT_POLICY,
    IMPOSSIBLE,
    Adopt,
    Decision,
    FleetPolicy,
    FleetState,
    LoadRange,
    Member,
    Target,
    UnloadRange,
)
from shared.layers import LayerRange
from shared.planning.plan import PlanImpossible


def decide(state: FleetState, forecast: Forecast, policy: FleetPolicy = DEFAULT_POLICY) -> Decision:
    """The next change, if it is time for one."""
    target = state.target
    if target is None or not _holds_out(state, target, policy):
        return _plan_needed(state, forecast, policy)
    if spared := _spare_for_lost(state, target, forecast, policy):
        return Decision(Adopt(spared))
    moving = next_move(state, target, policy)
    if moving.change is not None or moving.pending:
        return moving
    if _unsettled_s(state, policy) > 0:
        return Decision(pending="waiting for others that may be about to join")
    return _improve(state, target, forecast, policy)


# --- what must be ----------------------------------------------------------------------------------


def _holds_out(state: FleetState, target: Target, policy: FleetPolicy) -> bool:
    ranges = _counted_on(state, target, policy)
    return covers([*ranges.values(), *_fixed(state)], state.num_layers)


def _plan_needed(state: FleetState, forecast: Forecast, policy: FleetPolicy) -> Decision:
    if not state.members:
        return Decision()
    if not any(member.is_here and not member.is_leaving for member in state.members):
        return Decision(pending="no node that takes any range is here")
    if _unsettled_s(state, policy) > 0:
        return Decision(pending="waiting for others that may be about to join")
    reason = _why_needed(state, policy)
    try:
        ranges = _repair(state, forecast, policy)
    except PlanImpossible as error:
        return Decision(pending=f"{reason}, and {IMPOSSIBLE}: {error.message}")
    return Decision(Adopt(Target(ranges=ranges, reason=reason, adopted_at=state.now_s)))


def _repair(state: FleetState, forecast: Forecast, policy: FleetPolicy) -> Ranges:
    """What is held stays where that goes.

    Raises:
        PlanImpossible: Not even all members together can hold what fixed nodes do not.
    """
    held = _held(state, policy)
    chain = best_chain([*held.values(), *_fixed(state)], state.num_layers)
    kept = {node: layers for node, layers in held.items() if layers in chain}
    for staying in (kept, _without_copies(dict(sorted(kept.items())), _fixed(state))):
        free = [member for member in _givable(state) if member.node not in staying]
        try:
            return {**staying, **forecast.fill(free, chain, state.refused_cuts)}
        except PlanImpossible:
            continue
    return forecast.fill(_givable(state), best_chain(_fixed(state), state.num_layers), state.refused_cuts)


def _spare_for_lost(state: FleetState, target: Target, forecast: Forecast, policy: FleetPolicy) -> Target | None:
    """The target, with what nobody serves for a moment given to those that can be spared; the lost keep theirs too."""
    away_s = {node.node: node.away_s for node in state.members} | {node.node: node.away_s for node in state.fixed}
    lost = {node for node, seconds in away_s.items() if seconds >= policy.spare_grace_s}
    ranges = _counted_on(state, target, policy)
    lost &= {*ranges, *(node.node for node in state.fixed)}
    present = {node: layers for node, layers in ranges.items() if node not in lost}
    fixed = _fixed(state, without=lost)
    if not lost or covers([*present.values(), *fixed], state.num_layers):
        return None
    chain = best_chain([*present.values(), *fixed], state.num_layers)
    serving = {member.node for member in state.members if member.serves == present.get(member.node)}
    ordered = dict(sorted(present.items(), key=lambda item: (item[0] not in serving, item[0])))
    kept = _without_copies({node: layers for node, layers in ordered.items() if layers in chain}, fixed)
    try:
        filled = forecast.fill([m for m in _givable(state) if m.node not in kept], chain, state.refused_cuts)
    except PlanImpossible:
        return None
    names = ", ".join(sorted(lost))
    reason = f"{names} has been away for {policy.spare_grace_s:g} s, and others can be spared for its layers"
    return Target(ranges={**target.ranges, **filled}, reason=reason, adopted_at=state.now_s)


def _held(state: FleetState, policy: FleetPolicy) -> dict[str, LayerRange]:
    """What members hold or are meant to, and can go on holding."""
    held = dict(_counted_on(state, state.target, policy)) if state.target else {}
    for member in state.members:
        layers = member.serves
        if member.node not in held and layers and not member.is_leaving and not _is_refused(state, layers):
            held[member.node] = layers
    return held


def _counted_on(state: FleetState, target: Target, policy: FleetPolicy) -> dict[str, LayerRange]:
    """The part of a target that can be counted on."""
    return {
        member.node: layers
        for member in state.members
        if (layers := target.ranges.get(member.node))
        and not member.is_leaving
        and member.away_s < policy.grace_s
        and layers not in member.failed
        and not _is_refused(state, layers)
    }


def _without_copies(ranges: Ranges, fixed: list[LayerRange]) -> dict[str, LayerRange]:
    seen = set(fixed)
    single: dict[str, LayerRange] = {}
    for node, layers in ranges.items():
        if layers not in seen:
            seen.add(layers)
            single[node] = layers
    return single


def _why_needed(state: FleetState, policy: FleetPolicy) -> str:
    target = state.target
    if target is None:
        return "the first plan"
    known = {member.node: member for member in state.members}
    for node, layers in sorted(target.ranges.items()):
        member = known.get(node)
        if member is None or member.away_s >= policy.grace_s:
            return f"{node} ({layers}) has been away for {policy.grace_s:g} s"
        if member.is_leaving:
            return f"{node} ({layers}) is leaving"
        if _is_refused(state, layers):
            return f"{node} has found that the model cannot be cut at {layers}"
        if layers in member.failed:
            return f"{node} could not load {layers}"
    return "a node with a range of its own has gone"


# --- what a plan asks for --------------------------------------------------------------------------


def next_move(state: FleetState, target: Target, policy: FleetPolicy) -> Decision:
    """The next member to be told something, so that the target comes true."""
    waiting = [
        (member, layers)
        for member in state.members
        if member.is_here and not member.is_leaving
        if (layers := target.ranges.get(member.node)) and layers not in member.failed
        if (member.loading or member.layers) != layers
    ]
    for member, layers in waiting:
        if member.serves is None:
            return Decision(LoadRange(member.node, layers))
    for member, layers in waiting:
        if not _serves_now(state, policy) or _serves_now(state, policy, without=member.node):
            return Decision(LoadRange(member.node, layers))
    if any(member.loading for member in state.members):
        return Decision(pending="nodes are loading")
    if not waiting:
        return Decision()
    member, layers = waiting[0]
    if state.is_idle:
        return Decision(LoadRange(member.node, layers))
    return Decision(pending=f"{member.node} is to load {layers} once no answer needs what it holds")


def _serves_now(state: FleetState, policy: FleetPolicy, *, without: str | None = None) -> bool:
    """Whether all layers are served, or will be as soon as those are back that are away for a moment."""
    served = [
        layers
        for member in state.members
        if member.node != without and member.state == "ready" and member.away_s < policy.grace_s
        if (layers := member.layers)
    ]
    return covers([*served, *(node.layers for node in state.fixed if node.is_ready)], state.num_layers)


# --- what would be better --------------------------------------------------------------------------


def _improve(state: FleetState, target: Target, forecast: Forecast, policy: FleetPolicy) -> Decision:
    better = _better(state, target, forecast, policy)
    if better is not None:
        wait_s = state.improved_at + policy.improve_every_s - state.now_s
        if wait_s > 0:
            return Decision(pending=f"{better.reason}; in {wait_s:.0f} s at the earliest")
        if not (state.is_idle or _is_free_of_gaps(state, better, policy)):
            return Decision(pending=f"{better.reason}; once no answer is in the making")
        return Decision(Adopt(better, for_speed=True))
    spare = next(_spares(state, target, forecast, policy), None)
    if spare is not None:
        node, layers = spare
        reason = f"{node} stands in for {layers}"
        return Decision(Adopt(Target(ranges={**target.ranges, node: layers}, reason=reason, adopted_at=state.now_s)))
    for member in state.members:
        is_unused = member.serves and not member.is_leaving and member.node not in target.ranges
        if is_unused and _serves_now(state, policy, without=member.node):
            return Decision(UnloadRange(member.node))
    return Decision()


def _better(state: FleetState, target: Target, forecast: Forecast, policy: FleetPolicy) -> Target | None:
    """The best plan there is for those that are here, if it promises enough more than the one in force."""
    members = _givable(state)
    now = forecast.predict(state.members, _counted_on(state, target, policy), state.fixed)
    try:
        ranges = forecast.fill(members, best_chain(_fixed(state), state.num_layers), state.refused_cuts)
    except PlanImpossible:
        return None
    then = forecast.predict(members, ranges, state.fixed)
    if now is None or then is None:
        return None
    rate, better_rate = now.rate(policy.objective), then.rate(policy.objective)
    if better_rate < policy.gain_min * rate:
        return None
    reason = f"{better_rate:.3g} tokens/s are predicted instead of {rate:.3g}"
    return Target(ranges=ranges, reason=reason, adopted_at=state.now_s)


def _is_free_of_gaps(state: FleetState, target: Target, policy: FleetPolicy) -> bool:
    """Whether all layers stay served while a target comes true."""
    staying = [
        member.layers
        for member in state.members
        if member.state == "ready" and member.away_s < policy.grace_s and member.layers
        if target.ranges.get(member.node, member.layers) == member.layers
    ]
    return covers([*staying, *_fixed(state)], state.num_layers)


def _spares(
    state: FleetState, target: Target, forecast: Forecast, policy: FleetPolicy
) -> Iterator[tuple[str, LayerRange]]:
    """Members that the target has no use for, and what each could hold as well."""
    ranges = _counted_on(state, target, policy)
    for member in _givable(state):
        if member.node not in target.ranges:
            layers = forecast.replica_for(member, state.members, ranges, state.fixed)
            if layers is not None:
                yield member.node, layers


# --- who counts ------------------------------------------------------------------------------------


def _givable(state: FleetState) -> list[Member]:
    """Members that can be given a range."""
    return [member for member in state.members if member.is_here and not member.is_leaving and not member.failed]


def _fixed(state: FleetState, *, without: AbstractSet[str] = frozenset()) -> list[LayerRange]:
    return [node.layers for node in state.fixed if not node.is_leaving and node.node not in without]


def _is_refused(state: FleetState, layers: LayerRange) -> bool:
    return layers.start in state.refused_cuts or layers.end in state.refused_cuts


def _unsettled_s(state: FleetState, policy: FleetPolicy) -> float:
    """How long others are still waited for that may have been started with the last that joined."""
    last = max((member.joined_at for member in state.members if member.is_here), default=float("-inf"))
    return last + policy.settle_s - state.now_s
