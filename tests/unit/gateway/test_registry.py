"""Routes from what nodes say of themselves."""

from __future__ import annotations

from dataclasses import replace

from gateway.registry import NoRoute, find_route, replicas, uncovered
from shared.layers import LayerRange
from shared.messages import NodeInfo
from shared.route import Route

MODEL = "m"


def node(node_id: str, layers: str, **fields: object) -> NodeInfo:
    """A ready node of a model of six layers."""
    info = NodeInfo(node=node_id, model=MODEL, layers=LayerRange.parse(layers), num_layers=6, state="ready")
    return replace(info, **fields)  # type: ignore[arg-type]


def route_of(*nodes: NodeInfo, load: dict[str, int] | None = None) -> list[str] | str:
    """Node ids of the route, or why there is none."""
    route = find_route(nodes, model=MODEL, num_layers=6, load=load)
    return [hop.node for hop in route.hops] if isinstance(route, Route) else route.reason


def test_hops_stand_in_the_order_of_their_layers() -> None:
    """However nodes are listed, hidden states travel upwards."""
    assert route_of(node("c", "4:6"), node("a", "0:2"), node("b", "2:4")) == ["a", "b", "c"]


def test_fewest_hops_win() -> None:
    """A node that holds what two others hold saves a hop."""
    assert route_of(node("a", "0:2"), node("b", "2:4"), node("c", "4:6"), node("d", "0:4")) == ["d", "c"]


def test_least_loaded_replica_is_chosen() -> None:
    """Of two nodes with the same range, the one with fewer sessions serves."""
    nodes = [node("a", "0:3"), node("b", "3:6"), node("spare", "3:6")]
    assert route_of(*nodes, load={"b": 2, "spare": 1}) == ["a", "spare"]


def test_ties_are_broken_by_id() -> None:
    """The same nodes always give the same route."""
    nodes = [node("z", "0:6"), node("y", "0:6")]
    assert route_of(*nodes) == ["y"]
    assert route_of(*reversed(nodes)) == ["y"]


def test_overlapping_ranges_do_not_join() -> None:
    """Ranges must meet exactly."""
    reason = route_of(node("a", "0:4"), node("b", "3:6"))
    assert reason == (
        "layers 4:6 of 6 are not covered by ready nodes; none begins at layer 4, as one must (3:6 do not)"
    )


def test_reason_names_what_is_missing_and_who_could_bring_it() -> None:
    """A node that still loads is named; so is one that serves something else."""
    reason = route_of(node("a", "0:3"), node("b", "3:6", state="loading"), node("x", "3:6", model="other"))
    assert reason == ("layers 3:6 of 6 are not covered by ready nodes; b (3:6) is loading; x serves another model")
    assert route_of() == "no node is connected"


def test_node_of_another_depth_is_left_out() -> None:
    """The same fingerprint with another number of layers is no node of this model."""
    assert "x serves another model" in route_of(node("x", "0:6", num_layers=7))
    assert isinstance(find_route([node("x", "0:6")], model=MODEL, num_layers=7), NoRoute)


def test_replicas_hold_exactly_the_range_and_are_ready() -> None:
    """A replacement must hold the same layers of the same model now, and round as the node before it did."""
    nodes = [node("a", "0:3"), node("b", "0:3", state="draining"), node("c", "0:6"), node("d", "0:3", model="o")]
    assert [info.node for info in replicas(nodes, LayerRange(0, 3), model=MODEL, precision="f32")] == ["a"]
    assert replicas(nodes, LayerRange(0, 3), model=MODEL, precision="bf16") == []


def test_layers_that_no_ready_node_holds_are_ranges() -> None:
    """Of nodes that load, or serve another model, nothing counts."""
    nodes = [node("a", "1:2"), node("b", "3:4"), node("c", "5:6", state="loading")]
    assert [str(gap) for gap in uncovered(nodes, model="m", num_layers=6)] == ["0:1", "2:3", "4:6"]
    assert uncovered([node("a", "0:6")], model="m", num_layers=6) == []
