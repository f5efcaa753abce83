"""What people see of the plan in force: what it is, why, what it promises and what it gives."""

from __future__ import annotations

from typing import Any

from gateway.fleet.live import Fleet
from gateway.fleet.state import FixedNode, FleetState, Member
from gateway.observed import StepTimes
from shared.layers import LayerRange
from shared.planning.cost import GATEWAY_TOKEN_S


def plan_figures(fleet: Fleet) -> dict[str, Any]:
    """As JSON values; docs/operations.md explains each."""
    state, target, now_s = fleet.state(), fleet.target, fleet.clock.monotonic()
    ranges = target.ranges if target else {}
    prediction = None
    if fleet.forecast is not None:
        prediction = fleet.forecast.predict(state.members, ranges, state.fixed)
    stages = _stages(fleet, state)
    return {
        "objective": fleet.policy.objective,
        "sessions": fleet.forecast.demand.sessions if fleet.forecast else None,
        "context_len": fleet.forecast.demand.context_len if fleet.forecast else None,
        "stages": stages,
        "left_out": sorted(member.node for member in state.members if member.node not in ranges),
        "predicted_tokens_per_s": _rounded(1 / prediction.token_s if prediction else None),
        "observed_tokens_per_s": _rounded(_observed_rate(fleet)),
        "prompt_len": fleet.forecast.demand.prompt_len if fleet.forecast else None,
        "predicted_first_token_ms": _ms(prediction.first_token_s)
        if prediction and prediction.first_token_s is not None
        else None,
        "reason": target.reason if target else None,
        "adopted_s_ago": _rounded(now_s - target.adopted_at) if target else None,
        "pending": fleet.pending or None,
        "refused_cuts": sorted(state.refused_cuts),
    }


def _stages(fleet: Fleet, state: FleetState) -> list[dict[str, Any]]:
    ranges = fleet.target.ranges if fleet.target else {}
    by_range: dict[LayerRange, list[dict[str, Any]]] = {}
    for member in state.members:
        if layers := ranges.get(member.node):
            by_range.setdefault(layers, []).append(_member_figures(fleet, member, layers))
    for node in state.fixed:
        by_range.setdefault(node.layers, []).append(_fixed_figures(fleet, node))
    return [{"layers": [layers.start, layers.end], "nodes": nodes} for layers, nodes in sorted(by_range.items())]


def _member_figures(fleet: Fleet, member: Member, layers: LayerRange) -> dict[str, Any]:
    assert fleet.forecast is not None  # noqa: S101 - there is no target without
    cost = fleet.forecast.cost(member, layers)
    return {
        "node": member.node,
        "given": False,
        "precision": fleet.forecast.precision(member),
        "state": "away" if not member.is_here else "loading" if member.serves != layers else "ready",
        "memory_bytes": member.machine.memory_bytes,
        "weights_bytes": cost.weights_bytes,
        "kv_bytes": cost.kv_bytes,
        "free_bytes": cost.free_bytes,
        "predicted_token_ms": _ms(cost.latency_s),
        "layer_ms": _ms(fleet.forecast.machine(member).decode_s_per_layer),
        "layer_ms_from": "measurement" if member.layer_s is None else "steps",
        "predicted_transfer_ms": _ms(cost.transfer_s),
        "round_trip_ms": _ms(member.rtt_s),
        "bandwidth_mbit": None if member.bytes_per_s is None else round(member.bytes_per_s * 8 / 1e6, 3),
        **_observed_figures(_times(fleet, member.node)),
    }


def _fixed_figures(fleet: Fleet, node: FixedNode) -> dict[str, Any]:
    return {
        "node": node.node,
        "given": True,
        "precision": node.precision,
        "state": "ready" if node.is_ready else "away",
        "memory_bytes": None,
        "weights_bytes": None,
        "kv_bytes": None,
        "free_bytes": None,
        "predicted_token_ms": None,
        "layer_ms": None,
        "layer_ms_from": None,
        "predicted_transfer_ms": None,
        "round_trip_ms": None,
        "bandwidth_mbit": None,
        **_observed_figures(_times(fleet, node.node)),
    }


def _observed_figures(times: StepTimes | None) -> dict[str, Any]:
    return {
        "observed_steps": 0 if times is None else times.steps,
        "observed_token_ms": None if times is None else _ms(times.token_s),
        "observed_compute_ms": None if times is None else _ms(times.compute_s),
        "observed_queue_ms": None if times is None else _ms(times.queue_s),
        "observed_link_ms": None if times is None else _ms(times.link_s),
    }


def _observed_rate(fleet: Fleet) -> float | None:
    """What one answer gets on the hops of the last minute: of a range's copies the mean, weighted by their steps."""
    by_range: dict[LayerRange, list[StepTimes]] = {}
    for info in fleet.mesh.nodes():
        times = _times(fleet, info.node)
        if times is not None:
            by_range.setdefault(info.layers, []).append(times)
    reached, token_s = 0, GATEWAY_TOKEN_S
    for layers, copies in sorted(by_range.items()):
        if layers.start != reached:
            continue
        reached = layers.end
        token_s += sum(times.token_s * times.steps for times in copies) / sum(times.steps for times in copies)
    return 1 / token_s if reached == fleet.model.num_layers else None


def _times(fleet: Fleet, node: str) -> StepTimes | None:
    link = fleet.members.link(node)
    return None if link is None else link.observed.last_minute(fleet.clock.monotonic())


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
