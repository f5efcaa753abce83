"""Which node serves a hop: the one that it has, a replica, one that comes back, or none."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import structlog

from gateway.admission import Admission
from gateway.errors import GenerationFailed
from gateway.registry import replicas
from gateway.relay import Generation, Trouble
from gateway.reroute import RouteLost, other_route
from gateway.session import HopState, Session
from gateway.waiting import wait_first
from shared.messages import Cancel, NodeInfo

RETURN_WAIT_S = 2.0
"""How long a lost node may take to come back before its session is led over nodes that are cut elsewhere."""

log = structlog.stdlib.get_logger(__name__)


def leave(generation: Generation, index: int) -> bool:
    """Move a hop away from a node that is about to leave; False when there is nowhere to go yet.

    Raises:
        RouteLost: There is, but cut elsewhere.
    """
    session, admission = generation.session, generation.admission
    hop = session.hops[index]
    node = choose_node(generation.mesh.nodes(), session, hop, admission, avoid=True)
    if node is not None and node.node != hop.node:
        move(generation, index, node)
        return True
    if other_route(generation) is not None:
        raise RouteLost(index)
    return False


def move(generation: Generation, index: int, node: NodeInfo) -> None:
    """Let a hop be served by this node from now on, which may be the one that it had.

    The node that it leaves may by now serve another hop of the session: one that was given other layers, to which that
    hop has moved before this one was asked for again. Then it keeps the session, and its place.
    """
    session = generation.session
    hop = session.hops[index]
    if node.node != hop.node:
        stays = any(other.node == hop.node for other in session.hops if other is not hop)
        generation.admission.move(session.id, None if stays else hop.node, node)
        if not stays:
            generation.mesh.post(hop.node, Cancel(session=session.id))
        generation.figures.moves += 1
        log.warning("hop.moved", session=session.id, hop=index, source=hop.node, target=node.node)
    hop.place(node)


async def find_node(generation: Generation, index: int, *, avoid: bool) -> NodeInfo:
    """The node to serve a hop from now on, once there is one.

    Args:
        generation: Whose.
        index: The hop.
        avoid: Rather not the node that serves it now.

    Raises:
        RouteLost: None is coming soon, and others cover all layers between them.
        GenerationFailed: `node_lost`: the hop has been without a node for `failover_timeout_s`.
    """
    hop, clock = generation.session.hops[index], generation.clock
    trouble = generation.trouble.setdefault(index, Trouble())
    while True:
        changed = generation.mesh.changed
        node = choose_node(generation.mesh.nodes(), generation.session, hop, generation.admission, avoid=avoid)
        if node is not None:
            return node
        hope_s = 0.0 if generation.mesh.serves_otherwise(hop.node, hop.layers) else RETURN_WAIT_S - trouble.waited_s
        if hope_s <= 0 and other_route(generation) is not None:
            raise RouteLost(index)
        left_s = generation.failover_timeout_s - trouble.waited_s
        if left_s <= 0:
            raise GenerationFailed(
                "node_lost",
                f"no node that computes layers {hop.layers} in {hop.precision} came back "
                f"within {generation.failover_timeout_s:g} s",
                node=hop.node,
                layers=str(hop.layers),
            )
        started_at = clock.monotonic()
        wait_s = min(left_s, hope_s) if hope_s > 0 else left_s
        with generation.admission.claim(generation.session.id, partial(_can_serve, generation.session, hop)):
            await wait_first(clock, wait_s, changed.wait())
        trouble.waited_s += clock.monotonic() - started_at


def choose_node(
    nodes: Iterable[NodeInfo], session: Session, hop: HopState, admission: Admission, *, avoid: bool
) -> NodeInfo | None:
    """The best of the ready nodes of a hop's range that can what the session needs and have room for it.

    That is the one which serves the hop now, or, with `avoid`, any other; then the least loaded.
    """
    load = admission.load()
    candidates = [
        node
        for node in nodes
        if _can_serve(session, hop, node) and admission.has_room(node, session.id, admission.tokens(session.id))
    ]
    return min(
        candidates,
        key=lambda node: ((node.node == hop.node) == avoid, load[node.node], node.node),
        default=None,
    )


def _can_serve(session: Session, hop: HopState, node: NodeInfo) -> bool:
    return bool(replicas([node], hop.layers, model=session.model, precision=hop.precision, needs=session.needs))
