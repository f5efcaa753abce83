"""Which nodes can serve which layers: from what nodes say of themselves to a route."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gateway.needs import Needs
from shared.layers import LayerRange
from shared.messages import NodeInfo
from shared.route import Hop, Route

ANY = Needs()
"""Asks nothing but the layers."""


@dataclass(frozen=True, slots=True)
class NoRoute:
    """Why no route exists, in words for people."""

    reason: str


def find_route(
    nodes: Iterable[NodeInfo],
    *,
    model: str,
    num_layers: int,
    load: Mapping[str, int] | None = None,
    needs: Needs = ANY,
) -> Route | NoRoute:
    """The route with the fewest hops, then the least load, then the first ids in order.

    Args:
        nodes: Nodes that are connected; those that are not ready or serve another model are left out.
        model: Fingerprint of the model.
        num_layers: How many decoder layers it has.
        load: Sessions per node id, to choose among nodes of the same range.
        needs: What nodes must be able to do; those that cannot are left out.
    """
    known = list(nodes)
    usable = [node for node in known if _is_usable(node, model, num_layers) and needs.are_met_by(node)]
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
        return NoRoute(_explain(known, model, num_layers, needs, reached=max(best)))
    return Route(complete.hops)


def replicas(
    nodes: Iterable[NodeInfo], layers: LayerRange, *, model: str, precision: str, needs: Needs = ANY
) -> list[NodeInfo]:
    """Ready nodes that hold exactly this range of this model, compute it in this precision, and can what is asked.

    Another element type or quantization rounds differently: an answer that moved there in its middle could go on with
    other tokens than it would have had.
    """
    return [
        node
        for node in nodes
        if node.layers == layers
        and node.model == model
        and node.precision == precision
        and node.state == "ready"
        and needs.are_met_by(node)
    ]


def longest_context(nodes: Iterable[NodeInfo], *, model: str, num_layers: int) -> int:
    """Positions that some route takes at most; 0 when there is no route, or none of whose nodes says how many."""
    known = list(nodes)
    limits = sorted({node.context_len for node in known if node.context_len and _is_usable(node, model, num_layers)})
    for limit in (limits[-1] + 1, *reversed(limits)) if limits else ():
        needs = Needs(context_len=limit)
        if isinstance(find_route(known, model=model, num_layers=num_layers, needs=needs), Route):
            return limit if limit in limits else 0
    return 0


def uncovered(nodes: Iterable[NodeInfo], *, model: str, num_layers: int) -> list[LayerRange]:
    """The layers that no ready node holds, as ranges."""
    usable = [node.layers for node in nodes if _is_usable(node, model, num_layers)]
    held = {layer for layers in usable for layer in range(layers.start, layers.end)}
    gaps: list[LayerRange] = []
    for layer in range(num_layers):
        if layer in held:
            continue
        if gaps and gaps[-1].end == layer:
            gaps[-1] = LayerRange(gaps[-1].start, layer + 1)
        else:
            gaps.append(LayerRange(layer, layer + 1))
    return gaps


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


def _is_usable(node: NodeInfo, model: str, num_layers: int) -> bool:
    return _serves(node, model, num_layers) and node.state == "ready"


def _explain(nodes: Sequence[NodeInfo], model: str, num_layers: int, needs: Needs, *, reached: int) -> str:
    if not nodes:
        return "no node is connected"
    usable = [node for node in nodes if _is_usable(node, model, num_layers)]
    able = [node for node in usable if needs.are_met_by(node)]
    later = [str(layers) for layers in sorted({node.layers for node in able}) if layers.end > reached]
    reason = f"layers {reached}:{num_layers} of {num_layers} are not covered by ready nodes"
    if later:
        reason += f"; none begins at layer {reached}, as one must ({', '.join(later)} do not)"
    return "; ".join([reason, *_excuses(nodes, model, num_layers), *_shortcomings(usable, needs)])


def _excuses(nodes: Sequence[NodeInfo], model: str, num_layers: int) -> list[str]:
    """Why nodes that are connected do not count, whatever is asked of them."""
    others = [node for node in nodes if not _serves(node, model, num_layers)]
    waiting = [node for node in nodes if _serves(node, model, num_layers) and node.state != "ready"]
    excuses = [", ".join(f"{node.node} ({node.layers}) is {node.state}" for node in waiting)]
    excuses.append(", ".join(f"{node.node} serves another model" for node in others))
    return [excuse for excuse in excuses if excuse]


def _shortcomings(usable: Sequence[NodeInfo], needs: Needs) -> list[str]:
    """Why ready nodes do not count for this request."""
    shortcomings = []
    for node in usable:
        if not needs.fits(node):
            shortcomings.append(f"{node.node} ({node.layers}) takes {node.context_len} positions")
        elif unmet := needs.unmet(node):
            shortcomings.append(f"{node.node} ({node.layers}) does not support {', '.join(unmet)}")
    return shortcomings
