"""Which node serves a hop: the one that it has, a replica, one that comes back, or none."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial

import structlog

from gateway.admission import Admission
from gateway.errors import GenerationFailed
from gateway.giving_way import givers, is_wanted, take_places
from gateway.places import Claim
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
    stays = any(other.node == hop.node for other in session.hops if other is not hop)
    generation.admission.move(session.id, None if stays else hop.node, node)
    if node.node != hop.node:
        if not stays:
            generation.mesh.post(hop.node, Cancel(session=session.id))
        generation.figures.moves += 1
        log.warning("hop.moved", session=session.id, hop=index, source=hop.node, target=node.node)
    hop.place(node)
    generation.mesh.announce()  # others may have the place that it has left, and be admitted again


def has_place(generation: Generation, index: int) -> bool:
    """Whether a hop's node still keeps a place for the session, which gives it to others while it waits."""
    return generation.admission.has_place(generation.session.id, generation.session.hops[index].node)


async def settle(generation: Generation, index: int, *, avoid: bool = False) -> None:
    """Wait for a node to serve a hop, and put the hop there. Nothing is sent yet.

    Args:
        generation: Whose.
        index: The hop.
        avoid: Rather not the node that serves it now.

    Raises:
        RouteLost: None is coming soon, and others cover all layers between them.
        GenerationFailed: `node_lost`: for `failover_timeout_s` there has been no node for the hop, however free.
    """
    target = _target(generation, index, avoid=avoid) or await _wait(generation, index, avoid=avoid)
    if target.is_route:
        raise RouteLost(index)
    move(generation, index, target.nodes[0])


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a session could go on: one node for the hop, or the nodes of another route."""

    nodes: list[NodeInfo]
    is_route: bool


def _target(generation: Generation, index: int, *, avoid: bool, without: Collection[str] = ()) -> _Target | None:
    """Where a session has room; None where it has not. The places of sessions in `without` count as room."""
    session, admission, nodes = generation.session, generation.admission, generation.mesh.nodes()
    node = choose_node(nodes, session, session.hops[index], admission, avoid=avoid, without=without)
    if node is not None:
        return _Target([node], is_route=False)
    route = other_route(generation, without=without) if _hope_s(generation, index) <= 0 else None
    return None if route is None else _Target(route, is_route=True)


async def _wait(generation: Generation, index: int, *, avoid: bool) -> _Target:
    """Wait for room. Nodes that are full of this gateway's sessions are waited for as long as those take."""
    session, admission, mesh, clock = generation.session, generation.admission, generation.mesh, generation.clock
    trouble = generation.trouble.setdefault(index, Trouble())
    claim = Claim(partial(_can_serve, session, session.hops[index]))
    with admission.claim(session.id, claim):
        if is_wanted(generation):
            mesh.announce()
        while True:
            changed = mesh.changed
            if target := _target(generation, index, avoid=avoid):
                return target
            others = frozenset(admission.sessions) - {session.id}
            full = _target(generation, index, avoid=avoid, without=others)
            claim.route = frozenset(node.node for node in full.nodes) if full and full.is_route else frozenset()
            if full and (target := _taken(generation, index, claim, avoid=avoid)):
                return target
            left_s = math.inf if full else generation.failover_timeout_s - trouble.without_node_s
            if left_s <= 0:
                raise _node_lost(generation, session.hops[index])
            started_at = clock.monotonic()
            await wait_first(clock, min(left_s, _hope_s(generation, index) or math.inf), changed.wait())
            waited_s = clock.monotonic() - started_at
            trouble.waited_s += waited_s
            trouble.without_node_s += 0.0 if full else waited_s


def _taken(generation: Generation, index: int, claim: Claim, *, avoid: bool) -> _Target | None:
    """Where a session has room once others have given way to it, as they then have; None where it still has none."""
    giving = givers(generation, claim)
    target = _target(generation, index, avoid=avoid, without=giving) if giving else None
    if target is not None:
        take_places(generation, target.nodes, giving)
    return target


def _hope_s(generation: Generation, index: int) -> float:
    """For how long to hope for the hop's own node or a replica, before its session is led over nodes cut elsewhere."""
    hop, trouble = generation.session.hops[index], generation.trouble.get(index)
    if generation.mesh.serves_otherwise(hop.node, hop.layers):
        return 0.0
    return max(0.0, RETURN_WAIT_S - (trouble.waited_s if trouble else 0.0))


def _node_lost(generation: Generation, hop: HopState) -> GenerationFailed:
    return GenerationFailed(
        "node_lost",
        f"no node that computes layers {hop.layers} in {hop.precision} came back "
        f"within {generation.failover_timeout_s:g} s",
        node=hop.node,
        layers=str(hop.layers),
    )


def choose_node(
    nodes: Iterable[NodeInfo],
    session: Session,
    hop: HopState,
    admission: Admission,
    *,
    avoid: bool,
    without: Collection[str] = (),
) -> NodeInfo | None:
    """The best of the ready nodes of a hop's range that can what the session needs and have room for it.

    That is the one which serves the hop now, or, with `avoid`, any other; then the least loaded. The places of sessions
    in `without` count as room.
    """
    load = admission.load()
    candidates = [
        node
        for node in nodes
        if _can_serve(session, hop, node)
        and admission.has_room(node, session.id, admission.tokens(session.id), without=without)
    ]
    return min(
        candidates,
        key=lambda node: ((node.node == hop.node) == avoid, load[node.node], node.node),
        default=None,
    )


def _can_serve(session: Session, hop: HopState, node: NodeInfo) -> bool:
    return bool(replicas([node], hop.layers, model=session.model, precision=hop.precision, needs=session.needs))
