"""A plan as text and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shared.planning.commands import StartCommands
from shared.planning.fleet import Machine
from shared.planning.plan import Copy, Plan
from shared.planning.reasons import why_left_out, why_replica, why_stage
from shared.planning.units import duration_text, size_text


def plan_text(plan: Plan, machines: Sequence[Machine], commands: StartCommands) -> str:
    """What `meshnet plan` prints."""
    return "\n".join([*_summary(plan), "", *_stages(plan), *_left_out(plan, machines), "", *commands.lines(plan)])


def plan_json(plan: Plan, machines: Sequence[Machine], commands: StartCommands) -> dict[str, Any]:
    """What `meshnet plan --json` prints; durations in milliseconds, sizes in bytes."""
    return {
        "objective": plan.objective,
        "sessions": plan.demand.sessions,
        "context_len": plan.demand.context_len,
        "token_ms": _ms(plan.token_s),
        "tokens_per_s": round(plan.tokens_per_s, 3),
        "total_tokens_per_s": round(plan.total_tokens_per_s, 3),
        "slowest_stage_ms": _ms(plan.slowest_s),
        "prompt_len": plan.demand.prompt_len,
        "ttft_ms": None if plan.ttft_s is None else _ms(plan.ttft_s),
        "optimal": plan.is_optimal,
        "bound_ms": _ms(plan.bound_s),
        "stages": [
            {
                **_copy_json(stage.primary),
                "reason": why_stage(plan, index),
                "command": commands.node(stage.primary),
                "replicas": [
                    {
                        **_copy_json(replica),
                        "reason": why_replica(plan, stage, replica),
                        "command": commands.node(replica),
                    }
                    for replica in stage.replicas
                ],
            }
            for index, stage in enumerate(plan.stages)
        ],
        "left_out": [
            {"machine": machine.name, "reason": why_left_out(plan, machines, machine)} for machine in plan.left_out
        ],
        "gateway_command": commands.gateway(plan),
    }


def _summary(plan: Plan) -> Iterator[str]:
    demand = plan.demand
    yield (
        f"{plan.stages[-1].primary.layers.end} layers on {len(plan.stages)} hops, planned for {plan.objective}; "
        f"{demand.sessions} sessions of {demand.context_len} tokens"
    )
    yield f"  one answer    {plan.tokens_per_s:.3g} tokens/s, {duration_text(plan.token_s)} a token"
    yield (
        f"  all sessions  {plan.total_tokens_per_s:.3g} tokens/s; slowest stage {duration_text(plan.slowest_s)} a token"
    )
    first = "not predicted: give prefill_ms_per_layer_per_token" if plan.ttft_s is None else duration_text(plan.ttft_s)
    yield f"  first token   {first}" + ("" if plan.ttft_s is None else f" after a prompt of {demand.prompt_len} tokens")
    what = "time per token" if plan.objective == "latency" else "slowest stage"
    if plan.is_optimal:
        yield f"  no other route has a better {what}"
    else:
        yield f"  no route without replicas can have a {what} below {duration_text(plan.bound_s)}"


def _stages(plan: Plan) -> Iterator[str]:
    for index, stage in enumerate(plan.stages):
        yield _copy_line(stage.primary)
        yield f"    {why_stage(plan, index)}"
        for replica in stage.replicas:
            yield _copy_line(replica, "replica ")
            yield f"    {why_replica(plan, stage, replica)}"


def _left_out(plan: Plan, machines: Sequence[Machine]) -> Iterator[str]:
    for machine in plan.left_out:
        yield f"{machine.name}  left out"
        yield f"    {why_left_out(plan, machines, machine)}"


def _copy_line(copy: Copy, what: str = "") -> str:
    cost = copy.cost
    return (
        f"{copy.machine.name}  {what}layers {copy.layers}, "
        f"{size_text(cost.weights_bytes)} weights + {size_text(cost.kv_bytes)} K/V of "
        f"{size_text(copy.machine.memory_bytes)}, {duration_text(cost.latency_s)} a token "
        f"({duration_text(cost.compute_s)} compute)"
    )


def _copy_json(copy: Copy) -> dict[str, Any]:
    cost = copy.cost
    return {
        "machine": copy.machine.name,
        "layers": [copy.layers.start, copy.layers.end],
        "weights_bytes": cost.weights_bytes,
        "kv_bytes": cost.kv_bytes,
        "working_bytes": cost.working_bytes,
        "free_bytes": cost.free_bytes,
        "token_ms": _ms(cost.latency_s),
        "compute_ms": _ms(cost.compute_s),
        "transfer_ms": _ms(cost.transfer_s),
        "busy_ms": _ms(cost.busy_s),
        "prefill_ms": None if cost.prefill_s is None else _ms(cost.prefill_s),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 6)
