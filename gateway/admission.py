"""Who may start: a generation begins only when every hop of a route can hold one more session.

Theory of operation. A *reservation* is one session's place on one node: a slot, and the bytes that its
longest possible context takes there. Demands wait in one queue, first come, first served: a demand that
does not fit holds back those behind it, so a long one is never starved by short ones. The core decides
(`admit` returns who starts and on which route); whoever calls it wakes the waiting and calls it again
whenever a session ends or a node changes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.errors import AdmissionRefused
from gateway.registry import NoRoute, find_route
from shared.messages import NodeInfo
from shared.route import Route

RETRY_AFTER_S_MAX = 60
"""A client told to come back later than this would rather be told to go elsewhere."""
KV_GROWTH = 1.5
KV_POSITIONS_MIN = 256
"""A node allocates K/V for at least so many positions, and grows it by half: what it counts against its
budget may be this much more than the positions fill."""
SMOOTHING = 0.2
"""Weight of the newest generation in the average duration that `retry_after_s` is derived from."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a generation needs.

    Args:
        session: Its id.
        tokens: The longest its context can become. Where not even an empty node has room for so much, all
            of its room is reserved, and the generation may outgrow it.
        tokens_min: What must fit for it to begin at all.
    """

    session: str
    tokens: int
    tokens_min: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A demand that may start now, on this route, whose nodes are given by id."""

    session: str
    route: Route
    nodes: dict[str, NodeInfo]


class Admission:
    """Reservations per node, and the queue of those that wait for one.

    Args:
        model: Fingerprint that routes are planned for.
        num_layers: Layers that a route must cover.
        queue_max: How many demands may wait; one more is refused.
    """

    def __init__(self, *, model: str, num_layers: int, queue_max: int) -> None:
        self.model = model
        self.num_layers = num_layers
        self.queue_max = queue_max
        self._queue: dict[str, Demand] = {}
        self._reserved: dict[str, dict[str, int]] = {}  # node -> session -> bytes
        self._tokens: dict[str, int] = {}  # admitted session -> its demand
        self._usual_s = 0.0

    @property
    def queued(self) -> int:
        """Demands that wait."""
        return len(self._queue)

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

    def has_room(self, node: NodeInfo, session: str, tokens: int) -> bool:
        """Whether the node can hold this session beside what is reserved; its own place counts as free."""
        reserved = self._reserved.get(node.node, {})
        if not node.kv_cache or session in reserved:
            return True
        if len(reserved) >= node.kv_sessions_max:
            return False
        return not node.kv_bytes_max or sum(reserved.values()) + _cost_bytes(node, tokens) <= node.kv_bytes_max

    def enqueue(self, demand: Demand, nodes: Iterable[NodeInfo]) -> None:
        """Let a demand wait for its turn; call `admit` afterwards.

        Raises:
            AdmissionRefused: `session_too_large` when even an empty mesh could not hold it, `queue_full`.
        """
        nodes = list(nodes)
        capable = [node for node in nodes if _fits_empty(node, demand.tokens_min)]
        if self._has_route(nodes) and not self._has_route(capable):
            raise AdmissionRefused(
                "session_too_large",
                f"{demand.tokens_min} tokens of context are more than the mesh has memory for",
                retry_after_s=None,
                tokens=demand.tokens_min,
            )
        if len(self._queue) >= self.queue_max:
            raise AdmissionRefused(
                "queue_full",
                f"{len(self._queue)} generations are already waiting",
                retry_after_s=self.retry_after_s(),
                limit=self.queue_max,
            )
        self._queue[demand.session] = demand

    def withdraw(self, session: str) -> None:
        """Take a demand out of the queue: whoever made it has left."""
        self._queue.pop(session, None)

    def admit(self, nodes: Iterable[NodeInfo]) -> list[Admitted]:
        """Admit from the front of the queue as many as fit, and reserve their places."""
        nodes = list(nodes)
        admitted: list[Admitted] = []
        while self._queue:
            demand = next(iter(self._queue.values()))
            roomy = [node for node in nodes if self.has_room(node, demand.session, demand.tokens)]
            route = find_route(roomy, model=self.model, num_layers=self.num_layers, load=self.load())
            if isinstance(route, NoRoute):
                break
            del self._queue[demand.session]
            known = {node.node: node for node in nodes}
            on_route = {hop.node: known[hop.node] for hop in route.hops}
            self._reserve(demand, on_route.values())
            admitted.append(Admitted(demand.session, route, on_route))
        return admitted

    def move(self, session: str, source: str, target: NodeInfo) -> None:
        """Give up a session's place on one node and reserve one on another."""
        tokens = self._tokens[session]
        self._unreserve(source, session)
        self._reserved.setdefault(target.node, {})[session] = _cost_bytes(target, tokens)

    def release(self, session: str, *, lasted_s: float) -> None:
        """Free all places of a session that has ended; call `admit` afterwards."""
        if self._tokens.pop(session, None) is None:
            return
        for node in list(self._reserved):
            self._unreserve(node, session)
        self._usual_s += (SMOOTHING if self._usual_s else 1.0) * (lasted_s - self._usual_s)

    def retry_after_s(self) -> int:
        """When a place in the queue should be free: usual duration times those waiting per active one."""
        rounds = (self.queued + 1) / max(1, self.active)
        return min(RETRY_AFTER_S_MAX, max(1, math.ceil(self._usual_s * rounds)))

    def _has_route(self, nodes: Iterable[NodeInfo]) -> bool:
        return isinstance(find_route(nodes, model=self.model, num_layers=self.num_layers), Route)

    def _reserve(self, demand: Demand, nodes: Iterable[NodeInfo]) -> None:
        self._tokens[demand.session] = demand.tokens
        for node in nodes:
            self._reserved.setdefault(node.node, {})[demand.session] = _cost_bytes(node, demand.tokens)

    def _unreserve(self, node: str, session: str) -> None:
        places = self._reserved.get(node, {})
        places.pop(session, None)
        if not places:
            self._reserved.pop(node, None)


def _allocated_bytes(node: NodeInfo, tokens: int) -> int:
    if not node.kv_cache:
        return 0
    return max(KV_POSITIONS_MIN, math.ceil(tokens * KV_GROWTH)) * node.kv_bytes_per_token


def _cost_bytes(node: NodeInfo, tokens: int) -> int:
    """What a session reserves at a node: no more than the node has."""
    cost_bytes = _allocated_bytes(node, tokens)
    return min(cost_bytes, node.kv_bytes_max) if node.kv_bytes_max else cost_bytes


def _fits_empty(node: NodeInfo, tokens: int) -> bool:
    if not node.kv_cache:
        return True
    has_bytes = not node.kv_bytes_max or tokens * node.kv_bytes_per_token <= node.kv_bytes_max
    return node.kv_sessions_max > 0 and has_bytes
