"""Which nodes can serve which layers: from what nodes say of themselves to a route."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.layers import LayerRange
from shared.messages import NodeInfo
from shared.route import Hop, Route


@dataclass(frozen=True, slots=True)
class NoRoute:
    """Why no route exists, in words for people."""

    reason: str


def find_route(
    nodes: Iterable[NodeInfo], *, model: str, num_layers: int, load: Mapping[str, int] | None = None
) -> Route | NoRoute:
    """The route with the fewest hops, then the least load, then the first ids in order.

    Args:
        nodes: Nodes that are connected; those that are not ready or serve another model are left out.
        model: Fingerprint of the model.
        num_layers: How many decoder layers it has.
        load: Sessions per node id, to choose among nodes of the same range.
    """
    known = list(nodes)
    usable = [node for node in known if _serves(node, model, num_layers) and node.state == "ready"]
    best: dict[int, _Path] = {0: _Path(0, 0, ())}
    for node in sorted(usable, key=lambda node: (node.layers, node.node)):
        path = best.get(node.layers.start)
        if path is None:
            continue
        longer = path.extended(node, (load or {}).get(node.node, 0))
        shorter = best.get(node.layers.end)
        if shorter is None or longer.cost < shorter.cost:
            best[node.layers.end] = longer
    complete = best.get(num_layers)
    if complete is None:
        return NoRoute(_explain(known, model, num_layers, reached=max(best)))
    return Route(complete.hops)


def replicas(nodes: Iterable[NodeInfo], layers: LayerRange, *, model: str, dtype: str) -> list[NodeInfo]:
    """Ready nodes that hold exactly this range of this model and compute it in this element type.

    Another element type rounds differently: an answer that moved there in its middle could go on with other
    tokens than it would have had.
    """
    return [
        node
        for node in nodes
        if node.layers == layers and node.model == model and node.dtype == dtype and node.state == "ready"
    ]


@dataclass(frozen=True, slots=True)
class _Path:
    num_hops: int
    load: int
    hops: tuple[Hop, ...]

    @property
    def cost(self) -> tuple[int, int]:
        return self.num_hops, self.load

    def extended(self, node: NodeInfo, load: int) -> _Path:
        return _Path(self.num_hops + 1, self.load + load, (*self.hops, Hop(node.node, node.layers)))


def _serves(node: NodeInfo, model: str, num_layers: int) -> bool:
    return node.model == model and node.num_layers == num_layers


def _explain(nodes: Sequence[NodeInfo], model: str, num_layers: int, *, reached: int) -> str:
    if not nodes:
        return "no node is connected"
    others = [node for node in nodes if not _serves(node, model, num_layers)]
    waiting = [node for node in nodes if _serves(node, model, num_layers) and node.state != "ready"]
    reason = f"layers {reached}:{num_layers} of {num_layers} are not covered by ready nodes"
    ready = sorted({node.layers for node in nodes if _serves(node, model, num_layers) and node.state == "ready"})
    later = [str(layers) for layers in ready if layers.end > reached]
    if later:
        reason += f"; none begins at layer {reached}, as one must ({', '.join(later)} do not)"
    if waiting:
        reason += "; " + ", ".join(f"{node.node} ({node.layers}) is {node.state}" for node in waiting)
    if others:
        reason += "; " + ", ".join(f"{node.node} serves another model" for node in others)
    return reason
