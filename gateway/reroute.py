"""A session is led over other nodes, cut elsewhere: its hops' ranges are nobody's any more.

That happens when nodes are given other ranges while answers are in the making. What a node held of a session is of no
use to one that holds other layers, so everything is prefilled again from token ids, under a higher epoch. A token is
a function of the ids before it, so it stays the same; the new nodes must compute in the element type that the old ones
did, as a replica must.
"""

from __future__ import annotations

from collections.abc import Collection

import structlog

from gateway.registry import NoRoute, find_route
from gateway.relay import Generation
from gateway.session import HopState
from shared.messages import Cancel, NodeInfo

REROUTES_PER_PASS_MAX = 4
"""A fleet that changes so often while one pass is under way does not settle."""

log = structlog.stdlib.get_logger(__name__)


class RouteLost(Exception):
    """No node serves a hop of the route any more, and there is another route. Always followed by `reroute`."""

    def __init__(self, index: int) -> None:
        super().__init__(f"hop {index} has no node, and there is another route")
        self.index = index


def other_route(generation: Generation, *, without: Collection[str] = ()) -> list[NodeInfo] | None:
    """The nodes of the best route that can take the session over, in order; None when there is none.

    Args:
        generation: Whose.
        without: Sessions whose places count as free.
    """
    session, admission = generation.session, generation.admission
    tokens = admission.tokens(session.id)
    able = {
        node.node: node
        for node in generation.mesh.nodes()
        if _rounds_alike(node, session.hops) and admission.has_room(node, session.id, tokens, without=without)
    }
    route = find_route(
        able.values(),
        model=session.model,
        num_layers=admission.num_layers,
        load=admission.load(),
        needs=session.needs,
    )
    return None if isinstance(route, NoRoute) else [able[hop.node] for hop in route.hops]


def reroute(generation: Generation, index: int) -> None:
    """Lead a session over another route from now on; its next pass begins at position 0.

    Args:
        generation: Whose.
        index: The hop that was lost.
    """
    session = generation.session
    nodes = other_route(generation)
    assert nodes is not None  # noqa: S101 - `RouteLost` was raised for it, and nothing has been awaited since
    staying = {node.node for node in nodes}
    for hop in session.hops:
        if hop.node not in staying:
            generation.mesh.post(hop.node, Cancel(session=session.id))
    log.warning(
        "session.rerouted",
        session=session.id,
        lost=f"{session.hops[index].node}[{session.hops[index].layers}]",
        route=[f"{node.node}[{node.layers}]" for node in nodes],
        positions=session.pass_end,
    )
    generation.admission.reroute(session.id, nodes)
    session.recut(nodes, generation.journal)
    generation.trouble = {}
    generation.figures.reroutes += 1
    generation.mesh.announce()  # others may have the places that it has left, and be admitted again


def _rounds_alike(node: NodeInfo, hops: list[HopState]) -> bool:
    """Whether a node computes its layers in the precision in which they have been computed so far."""
    return all(
        hop.precision == node.precision
        for hop in hops
        if hop.layers.start < node.layers.end and node.layers.start < hop.layers.end
    )
