"""Who may start: a generation begins only when every hop of a route can hold one more session.

Theory of operation. A *reservation* is one session's place on one node: a slot, and the bytes that its
longest possible context takes there. Demands wait in one queue, by priority and then first come, first
served: a demand that does not fit holds back those behind it, so a long one is never starved by short ones of
its priority. One for which there is no route at all, however empty the mesh, holds nobody back. The core
decides (`admit` returns who starts and on which route); a session under way that has lost its place on a node
comes before all of them (`claim`). Whoever calls it wakes the waiting and calls it again
whenever a session ends or a node changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gateway.errors import AdmissionRefused
from gateway.needs import Needs
from gateway.places import Places, cost_bytes_at
from gateway.registry import ANY, NoRoute, find_route, longest_context
from shared.messages import NodeInfo
from shared.route import Route

RETRY_AFTER_S_MAX = 60
"""A client told to come back later than this would rather be told to go elsewhere."""
SMOOTHING = 0.2
"""Weight of the newest generation in the average duration that `retry_after_s` is derived from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request needs.

    Args:
        sessions: Ids of the sessions it wants to run at once, the most urgent first. It is admitted with as many
            of them as an empty mesh could hold, all at once or not at all, so that two requests can never wait
            for each other's places.
        tokens: The longest that the context of each can become. Where not even an empty node has room for so
            much, all of its room is reserved, and the session may outgrow it.
        tokens_min: What must fit for them to begin at all.
        needs: What nodes must be able to do.
        priority: Lower values start before higher ones; equal ones in the order in which they came. Nothing
            more is promised: a steady flow of lower values keeps a higher one waiting.
        resumes: The request has begun and wants its next sessions: it comes before those that have not, and no
            full queue refuses it or counts it.
    """

    sessions: tuple[str, ...]
    tokens: int
    tokens_min: int
    needs: Needs = ANY
    priority: int = 0
    resumes: bool = False

    @property
    def key(self) -> str:
        """What names the demand while it waits."""
        return self.sessions[0]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A demand of which these sessions may start now, on this route, whose nodes are given by id."""

    demand: Demand
    sessions: tuple[str, ...]
    route: Route
    nodes: dict[str, NodeInfo]


class Admission(Places):
    """The queue of those that wait to begin, and the places of those that have begun.

    Args:
        model: Fingerprint that routes are planned for.
        num_layers: Layers that a route must cover.
        queue_max: How many demands may wait; one more is refused.
        granted: How many sessions a node lets this gateway have of those that it can hold; None where it has not said.
    """

    def __init__(
        self,
        *,
        model: str,
        num_layers: int,
        queue_max: int,
        granted: Callable[[str], int | None] = lambda _: None,
    ) -> None:
        super().__init__(granted)
        self.model = model
        self.num_layers = num_layers
        self.queue_max = queue_max
        self._queue: dict[str, Demand] = {}
        self._usual_s = 0.0

    @property
    def queued(self) -> int:
        """Demands that wait."""
        return len(self._queue)

    def demand(self, node: str) -> tuple[int, int]:
        """Sessions that are on a node, and those that wait for a place, there or elsewhere."""
        queued = sum(len(demand.sessions) for demand in self._queue.values())
        return self.held(node), queued + len(self.claims)

    def enqueue(self, demand: Demand, nodes: Iterable[NodeInfo]) -> None:
        """Let a demand wait for its turn; call `admit` afterwards.

        Raises:
            AdmissionRefused: `context_too_long`, `sampling_unsupported` or `session_too_large` when even an empty
                mesh could not serve it; `queue_full`.
        """
        known = list(nodes)
        if self._route(known, ANY) is not None:
            self._refuse_impossible(demand, known)
        waiting = sum(not queued.resumes for queued in self._queue.values())
        if waiting >= self.queue_max and not demand.resumes:
            raise AdmissionRefused(
                "queue_full",
                f"{waiting} generations are already waiting",
                retry_after_s=self.retry_after_s(),
                limit=self.queue_max,
            )
        self._queue[demand.key] = demand

    def _refuse_impossible(self, demand: Demand, nodes: list[NodeInfo]) -> None:
        needs = demand.needs
        if self._route(nodes, Needs(context_len=needs.context_len)) is None:
            raise _context_too_long(
                needs.context_len, longest_context(nodes, model=self.model, num_layers=self.num_layers)
            )
        if self._route(nodes, needs) is None:
            raise _unsupported(needs, nodes)
        if self._route([node for node in nodes if _fits_empty(node, demand.tokens_min)], needs) is None:
            raise AdmissionRefused(
                "session_too_large",
                f"{demand.tokens_min} tokens of context are more than the mesh has memory for",
                retry_after_s=None,
                tokens=demand.tokens_min,
            )

    def withdraw(self, demand: Demand) -> None:
        """Take a demand out of the queue: whoever made it has left."""
        self._queue.pop(demand.key, None)

    def admit(self, nodes: Iterable[NodeInfo]) -> list[Admitted]:
        """Admit from the front of the queue as many as fit, and reserve their places."""
        known = list(nodes)
        free = [node for node in known if not any(claim.covers(node) for claim in self.claims.values())]
        admitted: list[Admitted] = []
        for demand in sorted(self._queue.values(), key=_precedence):
            count = self._sessions_at_once(demand, known)
            if not count:
                continue
            roomy = [node for node in free if self.has_room(node, demand.key, demand.tokens, count=count)]
            route = self._route(roomy, demand.needs)
            if route is None:
                break
            del self._queue[demand.key]
            admitted.append(self._reserve(demand, count, route, known))
        return admitted

    def _sessions_at_once(self, demand: Demand, nodes: list[NodeInfo]) -> int:
        """How many of its sessions one route could hold if nothing else ran; 0 when there is no route."""
        wanted = len(demand.sessions)
        held = {node.node: min(wanted, self._sessions_max(node, demand.tokens, wanted)) for node in nodes}
        for count in sorted(set(held.values()) - {0}, reverse=True):
            if self._route([node for node in nodes if held[node.node] >= count], demand.needs) is not None:
                return count
        return 0

    def _sessions_max(self, node: NodeInfo, tokens: int, wanted: int) -> int:
        """How many such sessions a node without any would hold for us; one without a cache serves any number."""
        if not node.kv_cache:
            return wanted
        granted = self._granted(node.node)
        sessions_max = node.kv_sessions_max if granted is None else min(max(1, granted), node.kv_sessions_max)
        cost_bytes = cost_bytes_at(node, tokens)
        if not node.kv_bytes_max or not cost_bytes:
            return sessions_max
        return min(sessions_max, node.kv_bytes_max // cost_bytes)

    def release(self, session: str, *, lasted_s: float) -> None:
        """Free all places of a session that has ended; call `admit` afterwards."""
        if self.free(session):
            self._usual_s += (SMOOTHING if self._usual_s else 1.0) * (lasted_s - self._usual_s)

    def retry_after_s(self) -> int:
        """When a place in the queue should be free: usual duration times those waiting per active one."""
        rounds = (self.queued + 1) / max(1, self.active)
        return min(RETRY_AFTER_S_MAX, max(1, math.ceil(self._usual_s * rounds)))

    def _route(self, nodes: Iterable[NodeInfo], needs: Needs) -> Route | None:
        route = find_route(nodes, model=self.model, num_layers=self.num_layers, load=self.load(), needs=needs)
        return None if isinstance(route, NoRoute) else route

    def _reserve(self, demand: Demand, count: int, route: Route, nodes: list[NodeInfo]) -> Admitted:
        known = {node.node: node for node in nodes}
        on_route = {hop.node: known[hop.node] for hop in route.hops}
        sessions = demand.sessions[:count]
        self.reserve(sessions, on_route.values(), demand.tokens)
        return Admitted(demand, sessions, route, on_route)


def _fits_empty(node: NodeInfo, tokens: int) -> bool:
    if not node.kv_cache:
        return True
    has_bytes = not node.kv_bytes_max or tokens * node.kv_bytes_per_token <= node.kv_bytes_max
    return node.kv_sessions_max > 0 and has_bytes


def _precedence(demand: Demand) -> tuple[bool, int]:
    return not demand.resumes, demand.priority


def _context_too_long(tokens: int, limit: int) -> AdmissionRefused:
    return AdmissionRefused(
        "context_too_long",
        f"prompt and answer may take {tokens} tokens together, and the mesh takes {limit}",
        retry_after_s=None,
        tokens=tokens,
        limit=limit,
    )


def _unsupported(needs: Needs, nodes: list[NodeInfo]) -> AdmissionRefused:
    """Names what the last hop that lacks least does not support."""
    unmet = min((needs.unmet(node) for node in nodes if node.is_last and needs.unmet(node)), key=len)
    return AdmissionRefused(
        "sampling_unsupported",
        f"no node that draws this model's tokens supports all of this: {', '.join(unmet)}",
        retry_after_s=None,
        unsupported=unmet,
    )
