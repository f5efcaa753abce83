"""Who has a place on which node, and which sessions under way wait for one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shared.messages import NodeInfo

KV_GROWTH = 1.5
KV_POSITIONS_MIN = 256
"""A node allocates K/V for at least so many positions, and grows it by half: what it counts against its
budget may be this much more than the positions fill."""


@dataclass(slots=True)
class Claim:
    """What a session under way waits for a place on.

    Args:
        serves: Whether a node, if it had room, would do.
        route: Nodes that all of them together would do instead.
    """

    serves: Callable[[NodeInfo], bool]
    route: frozenset[str] = frozenset()

    def covers(self, node: NodeInfo) -> bool:
        """Whether nobody is to be admitted there before."""
        return self.serves(node) or node.node in self.route


class Places:
    """A *place* is one session's on one node: a slot, and the bytes that its longest possible context takes there.

    Args:
        granted: How many sessions a node lets this gateway have of those that it can hold; None where it has not said.

    Attributes:
        claims: What sessions under way wait for, by session.
    """

    def __init__(self, granted: Callable[[str], int | None]) -> None:
        self.claims: dict[str, Claim] = {}
        self._granted = granted
        self._reserved: dict[str, dict[str, int]] = {}  # node -> session -> bytes
        self._tokens: dict[str, int] = {}  # admitted session -> its demand
        self._mates: dict[str, tuple[str, ...]] = {}  # admitted and not begun -> all that were admitted with it

    @property
    def active(self) -> int:
        """Sessions that have been admitted and not released."""
        return len(self._tokens)

    def load(self) -> Counter[str]:
        """Sessions reserved per node id."""
        return Counter({node: len(sessions) for node, sessions in self._reserved.items()})

    def tokens(self, session: str) -> int:
        """What an admitted session has reserved for."""
        return self._tokens[session]

    @property
    def sessions(self) -> list[str]:
        """Those that have been admitted and not released, in that order."""
        return list(self._tokens)

    def has_place(self, session: str, node: str) -> bool:
        """Whether a session has a place on a node: it may have given it to another while it waited."""
        return session in self._reserved.get(node, ())

    def places(self, session: str) -> set[str]:
        """The nodes on which a session has a place."""
        return {node for node, sessions in self._reserved.items() if session in sessions}

    def has_room(
        self, node: NodeInfo, session: str, tokens: int, *, count: int = 1, without: Collection[str] = ()
    ) -> bool:
        """Whether the node can hold `count` such sessions beside what is reserved; the place of `session` is free.

        So are those of the sessions in `without`.
        """
        reserved = self._reserved.get(node.node, {})
        if without:
            reserved = {other: nbytes for other, nbytes in reserved.items() if other not in without}
        if not node.kv_cache or session in reserved:
            return True
        granted = self._granted(node.node)
        sessions_max = node.kv_sessions_max if granted is None else min(granted, node.kv_sessions_max)
        if len(reserved) + count > sessions_max:
            return False
        if not node.kv_bytes_max or (count == 1 and not reserved):
            return True
        bytes_max = node.kv_bytes_max * sessions_max // node.kv_sessions_max
        return sum(reserved.values()) + count * cost_bytes_at(node, tokens) <= bytes_max

    def held(self, node: str) -> int:
        """Sessions that have a place on a node."""
        return len(self._reserved.get(node, ()))

    def reserve(self, sessions: tuple[str, ...], nodes: Collection[NodeInfo], tokens: int) -> None:
        """Give sessions that are admitted together a place on each of these nodes, for contexts of so many tokens."""
        for session in sessions:
            self._tokens[session] = tokens
            self._mates[session] = sessions
            self.reroute(session, nodes)

    @contextmanager
    def claim(self, session: str, claim: Claim) -> Iterator[None]:
        """While a session under way waits for a place on these nodes, nobody is admitted there before it.

        Call `admit` once it has its place, or has given up.
        """
        self.claims[session] = claim
        try:
            yield
        finally:
            self.claims.pop(session, None)

    def waits_with(self, session: str) -> tuple[str, Claim] | None:
        """The session that this one waits with, itself or one that it was admitted with; None when it goes on."""
        for each in (session, *self._mates.get(session, ())):
            if each in self.claims:
                return each, self.claims[each]
        return None

    def begin(self, session: str) -> None:
        """An admitted session is under way: from now on it waits for itself alone."""
        self._mates.pop(session, None)

    def give_back(self, session: str, node: str) -> None:
        """Give up a session's place on a node, which it has; it needs one again before it asks anything of the hop."""
        self._unreserve(node, session)

    def move(self, session: str, source: str | None, target: NodeInfo) -> None:
        """Give up a session's place on one node, if one is left, and reserve one on another."""
        tokens = self._tokens[session]
        if source is not None:
            self._unreserve(source, session)
        self._reserved.setdefault(target.node, {})[session] = cost_bytes_at(target, tokens)

    def reroute(self, session: str, targets: Iterable[NodeInfo]) -> None:
        """Give up all of a session's places and reserve one on each of these nodes."""
        for node in list(self._reserved):
            self._unreserve(node, session)
        for target in targets:
            self._reserved.setdefault(target.node, {})[session] = cost_bytes_at(target, self._tokens[session])

    def free(self, session: str) -> bool:
        """Give up all of a session's places, for good; returns whether it had been admitted."""
        self._mates.pop(session, None)
        self.claims.pop(session, None)
        for node in list(self._reserved):
            self._unreserve(node, session)
        return self._tokens.pop(session, None) is not None

    def _unreserve(self, node: str, session: str) -> None:
        places = self._reserved.get(node, {})
        places.pop(session, None)
        if not places:
            self._reserved.pop(node, None)


def _allocated_bytes(node: NodeInfo, tokens: int) -> int:
    if not node.kv_cache:
        return 0
    return max(KV_POSITIONS_MIN, math.ceil(tokens * KV_GROWTH)) * node.kv_bytes_per_token


def cost_bytes_at(node: NodeInfo, tokens: int) -> int:
    """What a session reserves at a node: no more than the node has."""
    cost_bytes = _allocated_bytes(node, tokens)
    return min(cost_bytes, node.kv_bytes_max) if node.kv_bytes_max else cost_bytes
