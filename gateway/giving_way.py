"""Sessions that wait give their places to others that can go on with them.

Theory of operation. A session that has lost a node keeps its places on the others while it waits for one more. Two of
them could wait for each other's places for ever. So a session that waits may *give way*: it loses its place on a node
where another session can then go on. Its journal, or the token ids, rebuild there or elsewhere what it held, when the
hop is needed next (`gateway.recovery`), as after any other loss.

- Who gives: a session that waits, and that no node it waits for has room for. Nothing of it is in the making then, so
  the other takes the place itself (`take_places`). What was admitted with it and has not begun gives as it does.
- To whom: to one that needs the place now, and was admitted earlier. The order never changes, so no two hand a place to
  and fro, and the first of those that wait gets all that others wait with. A session for which there is no node at all,
  and no other route, can do nothing with what it has: it gives to any.
- What: the fewest places that let the other go on at once, the youngest session's first; nothing that nobody needs.

It is known here what this gateway's own sessions hold. A node that is full of another gateway's sessions says so by its
grant; nobody gives way to them, nor they to ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import structlog

from gateway.admission import Admission
from gateway.places import Claim
from gateway.relay import Generation
from shared.messages import Cancel, NodeInfo

log = structlog.stdlib.get_logger(__name__)


def is_wanted(generation: Generation) -> bool:
    """Whether others wait for a place where a session has one: they look again once it waits as well."""
    admission, session = generation.admission, generation.session.id
    held = [node for node in generation.mesh.nodes() if admission.has_place(session, node.node)]
    return any(claim.covers(node) for node in held for other, claim in admission.claims.items() if other != session)


def givers(generation: Generation, claim: Claim) -> list[str]:
    """The sessions whose places this one may take now, in the order in which it does: the youngest first.

    Args:
        generation: Who waits.
        claim: For what.
    """
    admission, nodes = generation.admission, generation.mesh.nodes()
    wanted = [node.node for node in nodes if claim.covers(node)]
    sessions = admission.sessions
    own_age = sessions.index(generation.session.id)
    return [
        other
        for age, other in reversed(list(enumerate(sessions)))
        if age != own_age
        and any(admission.has_place(other, node) for node in wanted)
        and _gives_way(admission, other, nodes, is_younger=age > own_age)
    ]


def take_places(generation: Generation, nodes: Iterable[NodeInfo], giving: Sequence[str]) -> None:
    """Let sessions that give way leave these nodes, until each has room for this one, which moves in at once.

    Args:
        generation: Who needs the places.
        nodes: Where.
        giving: As `givers` says; all of them together make enough room.
    """
    admission, session = generation.admission, generation.session.id
    for node in nodes:
        for other in giving:
            if admission.has_room(node, session, admission.tokens(session)):
                break
            if admission.has_place(other, node.node):
                admission.give_back(other, node.node)
                generation.mesh.post(node.node, Cancel(session=other))
                log.warning("place.given", session=other, node=node.node, taken_by=session)


def _gives_way(admission: Admission, other: str, nodes: list[NodeInfo], *, is_younger: bool) -> bool:
    waiting = admission.waits_with(other)
    if waiting is None:
        return False
    session, claim = waiting
    able = [node for node in nodes if claim.serves(node)]
    if any(admission.has_room(node, session, admission.tokens(session)) for node in able):
        return False  # it is about to go on
    return is_younger or not (able or claim.route)
