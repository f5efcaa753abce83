"""Plans of fleets that somebody has: who is used, who stands by, who is left out and why."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest

from shared.models.facts import LayerFacts, ModelFacts, SlotFacts
from shared.planning.commands import NodeAddress, StartCommands
from shared.planning.fleet import Demand, Machine, Objective
from shared.planning.plan import MACHINES_MAX, Plan, PlanImpossible, plan_fleet
from shared.planning.reasons import why_left_out, why_replica, why_stage
from shared.planning.report import plan_json, plan_text

MB = 1 << 20
DEMAND = Demand(sessions=2, context_len=1000)
BIG_FLEET_CPU_S = 2.0
"""About 0.1 s on one free core; a search over sets of 64 machines would take longer than anyone lives."""


def model(
    num_layers: int = 24, *, forbidden: frozenset[int] = frozenset(), sizes: tuple[int, ...] = (30,)
) -> ModelFacts:
    """A model about as large as the default one; layers take the given MiB in turn."""
    layers = [LayerFacts(size * MB, size * MB, SlotFacts(512)) for size in sizes]
    return ModelFacts(
        layers=tuple(layers[index % len(layers)] for index in range(num_layers)),
        embedding_bytes=270 * MB,
        head_bytes=270 * MB,
        is_tied=False,
        shared_bytes=0,
        hidden_bytes=1792,
        forbidden_cuts=forbidden,
    )


def machine(name: str, memory_mb: int = 4096, ms: float = 1.0, **fields: Any) -> Machine:
    """A machine on a link that takes no time; its process takes 512 MB."""
    return Machine(
        name=name, memory_bytes=memory_mb * MB, decode_s_per_layer=ms / 1000, runtime_bytes=512 * MB, **fields
    )


def ranges(plan: Plan) -> dict[str, str]:
    """Every machine in use and its range."""
    return {copy.machine.name: str(copy.layers) for stage in plan.stages for copy in stage.copies}


def test_one_machine_that_holds_all_is_left_alone():
    """A second hop would only cost; the other one stands by."""
    plan = plan_fleet(model(), [machine("a"), machine("b", ms=1.2)], DEMAND)
    assert ranges(plan) == {"a": "0:24", "b": "0:24"}
    assert len(plan.stages) == 1
    assert plan.stages[0].primary.machine.name == "a"
    assert "only one hop" in why_stage(plan, 0)


def test_a_slow_machine_is_left_out_and_the_reason_says_what_it_would_cost():
    """It would make every token slower, also as a replica."""
    fleet = [machine("a"), machine("b"), machine("slow", ms=40)]
    plan = plan_fleet(model(), fleet, DEMAND)
    assert [left.name for left in plan.left_out] == ["slow"]
    reason = why_left_out(plan, fleet, fleet[2])
    assert "with it a token would take" in reason
    assert "over 1.5 times as long" in reason


def test_a_slow_machine_is_used_where_nothing_else_holds_the_model():
    """Memory is a limit, speed a wish; it gets as little as it can."""
    fleet = [machine("fast", 512 + 900, ms=1), machine("slow", 4096, ms=40)]
    plan = plan_fleet(model(), fleet, DEMAND)
    held = {stage.primary.machine.name: index for index, stage in enumerate(plan.stages)}
    assert set(held) == {"fast", "slow"}
    assert len(plan.stages[held["fast"]].primary.layers) > 12
    assert "holds what its memory takes" in why_stage(plan, held["fast"])
    assert "has memory for more" in why_stage(plan, held["slow"])


def test_a_machine_too_small_for_a_layer_is_left_out_for_its_memory():
    """The sentence gives both sizes."""
    fleet = [machine("a"), machine("pi", 520, ms=0.1)]
    plan = plan_fleet(model(), fleet, DEMAND)
    assert why_left_out(plan, fleet, fleet[1]).startswith("too little memory: 7.76 MiB are left for layers")


def test_caches_count_when_ranges_are_chosen():
    """More sessions move layers away from the small machine, and then make the plan impossible."""
    fleet = [machine("small", 512 + 800, ms=0.5), machine("large", 512 + 1600, ms=1)]
    few, many = (plan_fleet(model(), fleet, Demand(sessions=n, context_len=4000)) for n in (1, 12))

    def held(plan: Plan) -> int:
        return next(len(s.primary.layers) for s in plan.stages if s.primary.machine.name == "small")

    assert held(many) < held(few)
    with pytest.raises(PlanImpossible) as caught:
        plan_fleet(model(), fleet, Demand(sessions=400, context_len=4000))
    assert caught.value.code == "too_little_memory"
    assert "400 sessions of 4000 tokens" in caught.value.message


def test_no_range_ends_at_a_forbidden_cut():
    """Layers that share keys and values stay together."""
    forbidden = frozenset(range(5, 20))
    fleet = [machine(name, 512 + 900, ms=1) for name in "abc"]
    plan = plan_fleet(model(forbidden=forbidden), fleet, DEMAND)
    assert not {stage.primary.layers.end for stage in plan.stages} & forbidden
    assert plan.is_optimal


def test_an_uncuttable_piece_that_fits_nowhere_is_named():
    """With what it takes and what there is."""
    with pytest.raises(PlanImpossible, match=r"layers 0:24, which this model cannot cut, take .* a, the roomiest"):
        plan_fleet(model(forbidden=frozenset(range(1, 24))), [machine("a", 800), machine("b", 700)], DEMAND)


def test_memory_that_is_enough_in_all_but_not_in_place_is_told_apart():
    """The ends fit on no machine beside a layer."""
    fleet = [machine(f"m{index}", 512 + 200) for index in range(12)]
    with pytest.raises(PlanImpossible, match="but no placement of its pieces was found"):
        plan_fleet(model(), fleet, DEMAND)


def test_memory_that_is_too_little_in_all_is_added_up():
    """The user sees how much is missing."""
    with pytest.raises(
        PlanImpossible, match=r"the model takes 1\..* GiB with its caches, and the 2 machines have 1000 MiB"
    ):
        plan_fleet(model(), [machine("a", 1012), machine("b", 1012)], DEMAND)


def test_throughput_spreads_the_model_over_all_machines():
    """Equal machines get equal shares, but for the head's work."""
    fleet = [machine(name, ms=1) for name in "abcd"]
    plan = plan_fleet(model(), fleet, DEMAND, "throughput", replicas=False)
    assert len(plan.stages) == 4
    latency = plan_fleet(model(), fleet, DEMAND, replicas=False)
    assert plan.slowest_s < latency.slowest_s
    assert plan.token_s > latency.token_s
    assert "one piece more would make it the slowest stage" in why_stage(plan, 3), "it computes the head"


def test_whole_copies_beat_a_pipeline_where_they_fit():
    """Four machines that hold the model each serve as much as a pipeline of four, at a fraction of the latency."""
    fleet = [machine(name, ms=1) for name in "abcd"]
    plan = plan_fleet(model(), fleet, DEMAND, "throughput")
    assert [len(stage.copies) for stage in plan.stages] == [4]
    assert plan.slowest_s == pytest.approx(plan.stages[0].primary.cost.busy_s / 4)
    assert not plan.is_optimal
    assert plan.bound_s <= plan_fleet(model(), fleet, DEMAND, "throughput", replicas=False).slowest_s


def test_every_range_gets_a_second_copy_before_any_gets_a_third():
    """Losing any one machine then loses no layer."""
    fleet = [machine(name, 512 + 800, ms=1) for name in "abcdef"]
    plan = plan_fleet(model(), fleet, DEMAND)
    assert [len(stage.copies) for stage in plan.stages] == [3, 3]
    stage = plan.stages[0]
    assert "takes over when" in why_replica(plan, stage, stage.replicas[0])


def test_total_tokens_per_s_is_bounded_by_sessions_and_by_the_slowest_stage():
    """One session cannot fill a pipeline, and a thousand cannot exceed its slowest stage."""
    fleet = [machine(name, 512 + 800, ms=1) for name in "ab"]
    one = plan_fleet(model(), fleet, Demand(sessions=1, context_len=100), replicas=False)
    many = plan_fleet(model(), fleet, Demand(sessions=100, context_len=100), replicas=False)
    assert one.total_tokens_per_s == one.tokens_per_s
    assert many.total_tokens_per_s == 1 / many.slowest_s


def test_the_time_to_first_token_needs_every_hops_prefill_time():
    """One unknown makes the sum unknown."""
    fleet = [machine("a", 512 + 800, prefill_s_per_layer_token=1e-5), machine("b", 512 + 800)]
    assert plan_fleet(model(), fleet, DEMAND).ttft_s is None
    known = [machine(name, 512 + 800, prefill_s_per_layer_token=1e-5) for name in "ab"]
    assert (plan_fleet(model(), known, DEMAND).ttft_s or 0) > 24 * 512 * 1e-5


@pytest.mark.parametrize(
    ("fleet", "code"),
    [
        ([], "no_machines"),
        ([machine("a"), machine("a")], "duplicate_machine"),
        ([machine(f"m{index}") for index in range(MACHINES_MAX + 1)], "too_many_machines"),
    ],
)
def test_a_fleet_that_cannot_be_planned_for_is_refused(fleet: list[Machine], code: str):
    """With a code of its own."""
    with pytest.raises(PlanImpossible) as caught:
        plan_fleet(model(), fleet, DEMAND)
    assert caught.value.code == code


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("sizes", [(30,), (30, 30, 30, 41)], ids=["like layers", "unlike layers"])
def test_a_large_fleet_is_planned_at_once(objective: Objective, sizes: tuple[int, ...]):
    """64 machines of 64 kinds and 128 layers."""
    random = Random(7)
    fleet = [
        machine(f"m{index}", random.randint(700, 4000), random.uniform(0.3, 10), rtt_s=random.uniform(0, 0.01))
        for index in range(64)
    ]
    before = time.process_time()
    plan = plan_fleet(model(128, sizes=sizes), fleet, DEMAND, objective)
    assert time.process_time() - before < BIG_FLEET_CPU_S
    assert plan.stages[-1].primary.layers.end == 128
    assert all(copy.cost.free_bytes >= 0 for stage in plan.stages for copy in stage.copies)


def test_the_report_names_every_machine_and_its_figures():
    """Text and JSON say the same, and JSON holds every machine exactly once."""
    fleet = [machine("a", 512 + 800), machine("b", 512 + 800), machine("slow", ms=90)]
    plan = plan_fleet(model(), fleet, DEMAND)
    addresses = {item.name: NodeAddress(f"{item.name}:9001") for item in fleet}
    commands = StartCommands(
        model="m", dtype="auto", quantize="none", addresses=addresses, context_len=1000, sessions=2
    )
    text, data = plan_text(plan, fleet, commands), plan_json(plan, fleet, commands)
    assert f"{plan.tokens_per_s:.3g} tokens/s" in text
    assert "slow  left out" in text
    assert [stage["layers"] for stage in data["stages"]] == [
        [stage.primary.layers.start, stage.primary.layers.end] for stage in plan.stages
    ]
    assert [left["machine"] for left in data["left_out"]] == ["slow"]
    assert data["token_ms"] == pytest.approx(plan.token_s * 1000, rel=1e-4)
    assert data["optimal"] is True
