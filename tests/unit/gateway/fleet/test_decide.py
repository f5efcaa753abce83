"""The fleet's decisions, on values: when a plan is made or changed, and in which order nodes are told."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from gateway.fleet.cover import best_chain, covers, gaps
from gateway.fleet.state import FixedNode, FleetPolicy, LoadRange, Member, UnloadRange
from tests.support.fleet_world import LOAD_S, NUM_LAYERS, STEP_S, World, forecast, layers, machine

POLICY = FleetPolicy()


def started(*nodes: str, **machines: object) -> World:
    """A fleet that was started together and has loaded."""
    world = World()
    for node in nodes:
        world.join(node, machines.get(node, machine()))  # type: ignore[arg-type]
    world.run(POLICY.settle_s + LOAD_S + 2 * STEP_S)
    return world


# --- the first plan --------------------------------------------------------------------------------


def test_machines_that_start_together_are_planned_once():
    """They join one after the other, within the settling time each."""
    world = World()
    for node in "abcde":
        world.join(node, machine(3))
        world.run(POLICY.settle_s / 2)
    world.run(POLICY.settle_s + LOAD_S)
    assert world.adopted() == ["the first plan", *world.adopted()[1:]]
    assert len([reason for reason in world.adopted() if "plan" in reason]) == 1
    assert world.is_covered()


def test_nothing_is_told_before_all_layers_can_be_held():
    """The reason is there to read."""
    world = World()
    world.join("a", machine(6))
    world.run(60)
    assert world.changes == []
    assert "no plan is possible" in world.pending
    world.join("b", machine(6))
    world.run(POLICY.settle_s + LOAD_S + 1)
    assert sorted(world.held().values()) == ["0:6", "6:12"]


def test_ranges_that_are_held_already_stay():
    """A gateway that was started anew finds its fleet as it was."""
    world = World()
    world.join("a", layers=layers("0:5"), state="ready")
    world.join("b", machine(7), layers=layers("5:12"), state="ready")
    world.run(10)
    assert not any(isinstance(change, LoadRange) for change in world.changes)
    assert world.is_covered()


def test_nodes_whose_range_is_given_are_kept_as_they_are():
    """The plan fills what they leave open."""
    world = World(fixed=(FixedNode(node="f", layers=layers("3:6"), precision="f32"),))
    world.join("a", machine(3))
    world.join("b", machine(6))
    world.run(POLICY.settle_s + LOAD_S + 1)
    assert world.held() == {"a": "0:3", "b": "6:12"}
    assert world.is_covered()


def test_a_spare_stands_in_for_the_range_with_the_fewest_copies():
    """Spread over all before any is there three times."""
    world = started("a", "b")
    world.join("c")
    world.run(POLICY.settle_s + LOAD_S + 1)
    world.join("d")
    world.run(POLICY.settle_s + LOAD_S + 1)
    assert sorted(world.held().values()) == ["0:6", "0:6", "6:12", "6:12"]


def test_quantized_nodes_take_what_fits_them_quantized():
    """Two that hold weights in int8 take a model of which each would hold a third plain; and half of it is counted."""
    plain = started("a", "b", a=machine(4), b=machine(4))
    assert not plain.is_covered()
    assert "no plan is possible" in plain.pending
    quantized = started("a", "b", a=machine(4, quantize="int8"), b=machine(4, quantize="int8"))
    assert quantized.is_covered()
    held = quantized.members["a"]
    assert held.layers is not None
    cost = quantized.plans.cost(held, held.layers)
    assert cost.weights_bytes == len(held.layers) * 500 + 100
    assert cost.free_bytes == 4_250 - cost.weights_bytes - cost.kv_bytes - cost.working_bytes >= 0


def test_a_quantized_nodes_speed_counts_plain_bytes():
    """As it was measured: a layer takes as long as it said, whatever the layer takes there."""
    plans = World().plans
    for quantize in ("none", "int8"):
        member = Member(node="a", machine=machine(12, layer_ms=7, quantize=quantize))
        assert plans.machine(member).decode_s_per_layer == pytest.approx(0.007, rel=1e-4)


@pytest.mark.parametrize(("quantize", "held"), [("int8", None), ("none", "0:12")])
def test_a_spare_stands_in_only_for_what_is_held_alike(quantize: str, held: str | None):
    """An answer that moved between quantizations could go on with other tokens."""
    world = started("a", a=machine(12))
    world.join("b", machine(12, quantize=quantize))
    world.run(POLICY.settle_s + LOAD_S + 1)
    assert world.held().get("b") == held


def test_copies_of_the_first_plan_are_alike_too():
    """Three machines for one range each: the two plain ones hold it, the quantized one nothing."""
    plain, quantized = machine(12, layer_ms=1), machine(12, layer_ms=1.2, quantize="int8")
    assert started("a", "b", "c", a=plain, b=plain, c=quantized).held() == {"a": "0:12", "b": "0:12"}


# --- needed changes --------------------------------------------------------------------------------


def test_a_node_that_restarts_gets_the_range_that_it_had():
    """At once, and without another plan."""
    world = started("a", "b")
    had = world.held()
    world.lose("b")
    world.run(5)
    assert len(world.adopted()) == 1
    world.join("b")
    assert world.decide().change == LoadRange("b", layers(had["b"]))
    world.run(LOAD_S + 1)
    assert world.held() == had
    assert len(world.adopted()) == 1


def test_a_node_lost_for_longer_than_the_grace_is_replaced():
    """Not earlier: loading takes longer than most restarts."""
    world = started("a", "b")
    world.lose("b")
    world.join("c")
    world.run(POLICY.grace_s - 5)
    assert world.held().get("c") != "6:12" or len(world.adopted()) == 2, "at most as a replica"
    world.run(5 + LOAD_S + 1)
    assert world.is_covered()


def test_a_node_that_can_be_spared_takes_a_lost_ones_layers_early():
    """Answers wait for them. The lost one has its range back when it returns, and nobody loads anything again."""
    world = started("a", "b", "c")
    world.run(POLICY.settle_s + LOAD_S + 1)
    held = world.held()
    lone = next(node for node in held if list(held.values()).count(held[node]) == 1)
    world.is_idle = False
    world.lose(lone)
    world.run(POLICY.spare_grace_s - 2 * STEP_S)
    assert not world.is_covered()
    world.run(LOAD_S + 4 * STEP_S)
    assert world.is_covered()
    plans, serving = len(world.adopted()), world.held()
    world.join(lone)
    world.run(60)
    assert world.held() == {**serving, lone: held[lone]}
    assert len(world.adopted()) == plans


def test_a_node_that_can_be_spared_takes_a_lost_fixed_ones_layers_early():
    """A range that was given by hand is missed as much as any other."""
    near = FixedNode(node="near", layers=layers("0:6"), precision="f32")
    far = FixedNode(node="far", layers=layers("6:12"), precision="f32")
    world = World(fixed=(near, far))
    world.join("spare")
    world.run(POLICY.settle_s + LOAD_S + 1)
    world.is_idle = False
    world.fixed = (near, replace(far, away_s=POLICY.spare_grace_s - 1, is_ready=False))
    world.run(LOAD_S + 4 * STEP_S)
    assert world.held() == {"spare": "0:6"}
    world.fixed = (near, replace(far, away_s=POLICY.spare_grace_s, is_ready=False))
    world.run(LOAD_S + 4 * STEP_S)
    assert world.held() == {"spare": "6:12"}
    assert world.adopted()[-1] == "far has been away for 5 s, and others can be spared for its layers"
    world.fixed = (near, far)
    world.run(30)
    assert world.held() == {"spare": "6:12"}


def test_a_leaving_node_is_replaced_before_it_goes():
    """What it serves is served by another one too from then on."""
    world = started("a", "b")
    world.is_idle = False
    range_of_b = world.held()["b"]
    world.leave("b")
    world.join("c")
    world.run(POLICY.settle_s + LOAD_S + 1)
    assert world.held()["c"] == range_of_b
    assert world.held()["b"] == range_of_b, "it was told nothing"
    assert "b" in world.adopted()[-1]


def test_a_refused_cut_is_planned_around():
    """A node that loads finds that layers depend on each other across its boundary."""
    world = started("a", "b", a=machine(8), b=machine(8))
    world.refused_cuts = frozenset({layers(world.held()["a"]).end % NUM_LAYERS or layers(world.held()["b"]).end})
    world.run(2 * LOAD_S + 2)
    assert world.is_covered()
    assert not {layers(held).start for held in world.held().values()} & world.refused_cuts
    assert "cannot be cut" in world.adopted()[-1]


def test_a_range_that_cannot_be_loaded_goes_to_another():
    """Which takes a spare, and leaves out who failed."""
    world = World()
    world.join("a", machine(12), failed=frozenset({layers("0:12")}))
    world.join("b", machine(12, layer_ms=20))
    world.run(POLICY.settle_s + LOAD_S + 1)
    assert world.held() == {"b": "0:12"}


# --- changes for speed -----------------------------------------------------------------------------


def test_a_small_gain_changes_nothing():
    """Ten percent are within what figures of machines are wrong by."""
    world = started("a", a=machine(12, layer_ms=10))
    world.join("b", machine(12, layer_ms=9.2))
    world.run(300)
    assert world.held()["a"] == "0:12"
    assert not any("predicted" in reason for reason in world.adopted())


def test_a_faster_machine_takes_over_once_it_has_loaded():
    """The slower one serves until then, and holds nothing that nobody needs afterwards."""
    world = started("a", a=machine(12, layer_ms=10))
    world.is_idle = False
    world.join("b", machine(12, layer_ms=2))
    world.run(POLICY.settle_s + LOAD_S / 2)
    assert world.held() == {"a": "0:12"}
    world.run(LOAD_S + 1)
    assert "b" in world.held()
    assert "predicted" in next(reason for reason in world.adopted()[1:])


def test_speed_alone_changes_a_plan_once_a_minute():
    """However often something better appears."""
    world = started("a", a=machine(12, layer_ms=64))
    for number, layer_ms in enumerate((32, 16, 8, 4, 2, 1)):
        world.join(f"b{number}", machine(12, layer_ms=layer_ms))
        world.run(POLICY.settle_s + LOAD_S + 1)
    speedups = [reason for reason in world.adopted() if "predicted" in reason]
    assert 1 <= len(speedups) <= 1 + world.now_s // POLICY.improve_every_s - 1000 // POLICY.improve_every_s


def test_what_would_interrupt_answers_waits_until_there_are_none():
    """Both would have to load at once, and nobody could serve meanwhile."""
    world = started("a", a=machine(12, layer_ms=10))
    world.is_idle = False
    world.join("b", machine(6, layer_ms=1))
    world.run(200)
    assert world.held()["a"] == "0:12"
    assert "no answer" in world.pending
    world.is_idle = True
    world.run(3 * LOAD_S)
    assert world.held() == {"a": world.held()["a"], "b": world.held()["b"]}
    assert world.held()["a"] != "0:12"
    assert world.is_covered()


# --- whatever happens ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_layers_that_are_served_stay_served_while_answers_run(seed: int, objective: str):
    """Nodes come, go, restart and leave at random: no decision takes a range away that answers need."""
    rng = Random(seed)
    world = World(plans=forecast(objective), is_idle=False)  # type: ignore[arg-type]
    for _ in range(100):
        _happen(world, rng)
        world.pass_time()
        for _ in range(100):
            before, changes = world.is_covered(hoped=True), len(world.changes)
            if world.decide().change is None:
                break
            assert len(world.changes) == changes + 1
            change = world.changes[-1]
            if before and isinstance(change, LoadRange | UnloadRange):
                assert world.is_covered(hoped=True), f"{change} took the last of its layers"
        else:
            raise AssertionError(f"no rest: {world.changes[-4:]}")


def _happen(world: World, rng: Random) -> None:
    here = [node for node, member in world.members.items() if member.is_here]
    away = [node for node, member in world.members.items() if not member.is_here]
    match rng.randrange(12):
        case 0 if len(world.members) < 7:
            world.join(f"n{len(world.members)}", machine(rng.choice([3, 4, 6, 12]), layer_ms=rng.choice([1, 5, 20])))
        case 1 if here:
            world.lose(rng.choice(here))
        case 2 | 3 if away:
            world.join(rng.choice(away))
        case 4 if here and rng.random() < 0.3:
            world.leave(rng.choice(here))


@pytest.mark.parametrize("seed", range(4))
def test_a_fleet_left_alone_comes_to_rest_and_serves(seed: int):
    """After a while of disorder, those that are here serve all layers if they can, and nobody is told anything more."""
    rng = Random(seed)
    world = World()
    for _ in range(60):
        _happen(world, rng)
        world.pass_time()
        world.settle()
    for node, member in list(world.members.items()):
        if not member.is_here or member.is_leaving:
            world.join(node)
    world.run(150)
    done = len(world.changes)
    world.run(100)
    assert len(world.changes) == done
    room = sum(member.machine.memory_bytes - 250 for member in world.members.values())
    assert world.is_covered() or room < NUM_LAYERS * 1000 + 1000


@pytest.mark.parametrize("period_s", [4.0, 20.0, 40.0])
def test_a_node_that_flaps_does_not_make_the_fleet_thrash(period_s: float):
    """The others keep what they hold, and serve, for five minutes of it."""
    world = started("a", "b", "c", a=machine(6), b=machine(6), c=machine(6, layer_ms=1))
    world.is_idle = False
    plans = len(world.adopted())
    for _ in range(int(300 / period_s)):
        world.lose("c")
        world.run(period_s / 2)
        world.join("c")
        world.run(period_s / 2)
    assert len(world.adopted()) - plans <= 300 / POLICY.improve_every_s + 2
    loads = [change for change in world.changes if isinstance(change, LoadRange) and change.node != "c"]
    assert len(loads) <= 6


# --- covering --------------------------------------------------------------------------------------


def test_covering():
    """One behind the other, exactly."""
    assert covers([layers("0:4"), layers("4:12"), layers("2:3")], 12)
    assert not covers([layers("0:4"), layers("5:12")], 12)
    assert not covers([layers("0:5"), layers("4:12")], 12)
    assert best_chain([layers("0:5"), layers("4:12"), layers("0:2")], 12) == [layers("0:2"), layers("4:12")]
    assert gaps([layers("0:2"), layers("4:12")], 12) == [layers("2:4")]
    assert gaps([], 3) == [layers("0:3")]


def test_a_member_that_is_away_is_told_nothing():
    """Its load would be lost."""
    world = started("a", "b")
    world.members["b"] = replace(world.members["b"], away_s=1.0, layers=None, state=None)
    assert world.decide().change is None
