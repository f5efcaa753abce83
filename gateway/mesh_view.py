"""What people and tests see of the mesh: the answer to ``GET /mesh``."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.fleet.live import Fleet
from gateway.fleet.view import plan_figures
from gateway.generation import Generator
from gateway.mesh import Mesh
from gateway.node_link import NodeLink
from gateway.registry import NoRoute, find_route, uncovered
from gateway.waiting import wait_first
from shared.clock import Clock
from shared.errors import LinkClosed
from shared.link import LinkCounters
from shared.messages import NodeInfo, NodeStats

OUTCOMES = ("started", "completed", "cancelled", "failed", "refused")


class MeshView:
    """Read-only figures of a gateway and its nodes.

    Args:
        mesh: The nodes.
        generator: What runs on them.
        clock: Time.
        fleet: Gives nodes their ranges; None where all are given.
    """

    def __init__(self, mesh: Mesh, generator: Generator, *, clock: Clock, fleet: Fleet | None = None) -> None:
        self._mesh = mesh
        self._generator = generator
        self._clock = clock
        self._fleet = fleet

    def ready(self) -> bool:
        """Whether a full route exists."""
        return self.missing_route() is None

    def missing_route(self) -> str | None:
        """Why no route exists, in words; None when one does."""
        return self._generator.missing_route()

    def readiness(self) -> dict[str, Any]:
        """Why there is no route, which layers lack, and who is there, as JSON values; nothing is asked of the nodes."""
        admission = self._generator.admission
        gaps = uncovered(self._mesh.nodes(), model=admission.model, num_layers=admission.num_layers)
        return {
            "reason": self.missing_route(),
            "missing_layers": [[gap.start, gap.end] for gap in gaps],
            "nodes": [_presence(link, is_used=self._mesh.is_used(link)) for link in self._mesh.links],
        }

    async def refresh(self, timeout_s: float = 1.0) -> None:
        """Ask every node for its figures now. A node that does not answer in time keeps its old ones."""
        asking = [asyncio.create_task(_measured(link)) for link in self._mesh.links if link.is_open]
        if not asking:
            return
        gathered = asyncio.gather(*asking)
        try:
            await wait_first(self._clock, timeout_s, gathered)
        finally:
            gathered.cancel()
            await asyncio.gather(gathered, return_exceptions=True)

    def snapshot(self) -> dict[str, Any]:
        """Everything as JSON values; see ``docs/protocol.md`` for the nodes' own counters."""
        return {
            "model": self._generator.admission.model,
            "num_layers": self._generator.admission.num_layers,
            "ready": self.ready(),
            "reason": self.missing_route(),
            "route": self._route(),
            "plan": None if self._fleet is None else plan_figures(self._fleet),
            "nodes": [_node_figures(link, is_used=self._mesh.is_used(link)) for link in self._mesh.links],
            "gateway": self._gateway_figures(),
        }

    def _route(self) -> list[dict[str, Any]] | None:
        admission = self._generator.admission
        route = find_route(
            self._mesh.nodes(), model=admission.model, num_layers=admission.num_layers, load=admission.load()
        )
        if isinstance(route, NoRoute):
            return None
        return [{"node": hop.node, "layers": [hop.layers.start, hop.layers.end]} for hop in route.hops]

    def _gateway_figures(self) -> dict[str, Any]:
        generator, totals = self._generator, self._generator.totals
        running = generator.running_figures()
        return {
            "active": len(running),
            "queued": generator.admission.queued,
            "reserved": dict(generator.admission.load()),
            "generations": {outcome: totals.outcomes[outcome] for outcome in OUTCOMES},
            "passes": totals.passes + sum(figures.passes for figures in running),
            "misses": totals.misses + sum(figures.misses.total() for figures in running),
            "replays": totals.replays + sum(figures.replays for figures in running),
            "full_replays": totals.full_replays + sum(figures.full_replays for figures in running),
            "moves": totals.moves + sum(figures.moves for figures in running),
            "reroutes": totals.reroutes + sum(figures.reroutes for figures in running),
            "journal_bytes": generator.journal.nbytes,
            "journal_bytes_max": generator.journal.bytes_max,
            "journal_drops": generator.journal.drops,
        }


async def _measured(link: NodeLink) -> None:
    try:
        await link.measure()
    except LinkClosed:
        return  # the snapshot says that it is not connected


def _node_figures(link: NodeLink, *, is_used: bool) -> dict[str, Any]:
    return {
        **_info_figures(link.info),
        "id": link.node,
        "joined": link.joined,
        "url": link.url,
        "state": _state(link, is_used=is_used),
        "away_s": _away_s(link),
        **_stats_figures(link.stats),
        "load_progress": _load_progress(link),
        "load_error": link.load_error,
        "waiting_steps": link.waiting,
        "link": _link_figures(link),
    }


def _presence(link: NodeLink, *, is_used: bool) -> dict[str, Any]:
    info = link.info
    return {
        "id": link.node,
        "url": link.url,
        "layers": [info.layers.start, info.layers.end] if info else None,
        "state": _state(link, is_used=is_used),
        "away_s": _away_s(link),
        **_memory_figures(link.stats),
    }


def _away_s(link: NodeLink) -> float | None:
    away_s = link.away_s()
    return None if away_s is None else round(away_s, 3)


def _memory_figures(stats: NodeStats | None) -> dict[str, int | None]:
    if stats is None:
        return {"memory_bytes": None, "memory_limit_bytes": None, "weights_bytes": None}
    return {
        "memory_bytes": stats.memory_bytes or None,
        "memory_limit_bytes": stats.memory_limit_bytes or None,
        "weights_bytes": stats.weights_bytes or None,
    }


def _state(link: NodeLink, *, is_used: bool) -> str:
    if not link.is_open:
        return "away" if link.joined else "unreachable"
    if link.info is None:
        return "loading" if link.load_progress is not None else "waiting"
    return link.info.state if is_used else "duplicate"


def _info_figures(info: NodeInfo | None) -> dict[str, Any]:
    if info is None:
        return {"id": None, "pid": None, "layers": None, "device": None, "dtype": None, "quantize": None}
    return {
        "id": info.node,
        "pid": info.pid,
        "layers": [info.layers.start, info.layers.end],
        "device": info.device,
        "dtype": info.dtype,
        "quantize": info.quantize,
        "model": info.model,
        "model_name": info.model_name,
        "kv_cache": info.kv_cache,
        "kv_ttl_s": info.kv_ttl_s,
        "kv_sessions_max": info.kv_sessions_max,
        "kv_bytes_max": info.kv_bytes_max,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "context_len": info.context_len,
        "needs_token_ids": info.needs_token_ids,
        "refused_cuts": info.refused_cuts,
        "sampling": info.sampling,
        "features": info.features,
    }


def _stats_figures(stats: NodeStats | None) -> dict[str, Any]:
    stats = stats or NodeStats(steps={}, misses={}, evictions={}, errors={})
    return {
        "sessions": stats.sessions,
        "kv_bytes": stats.kv_bytes,
        "queued_steps": stats.queued_steps,
        "steps": {mode: stats.steps.get(mode, 0) for mode in ("prefill", "decode", "stateless")},
        "misses": stats.misses,
        "evictions": stats.evictions,
        "errors": stats.errors,
        "busy_ms": round(stats.busy_us / 1000, 3),
        **_memory_figures(stats),
    }


def _load_progress(link: NodeLink) -> dict[str, int] | None:
    if link.load_progress is None:
        return None
    done_bytes, total_bytes = link.load_progress
    return {"done_bytes": done_bytes, "total_bytes": total_bytes}


def _link_figures(link: NodeLink) -> dict[str, Any]:
    error = link.last_error
    return {
        "connected": link.is_open,
        "round_trip_ms": None if link.round_trip_s is None else round(link.round_trip_s * 1000, 3),
        "bandwidth_mbit": None if link.bytes_per_s is None else round(link.bytes_per_s * 8 / 1e6, 3),
        "reconnects": max(0, link.connects - 1),
        "late_answers": link.late_answers,
        "last_error": None if error is None else {"code": error.code, "message": error.message},
        **_counter_figures(link.counters()),
    }


def _counter_figures(counters: LinkCounters) -> dict[str, dict[str, int]]:
    return {
        "sent_frames": dict(counters.sent_frames),
        "sent_bytes": dict(counters.sent_bytes),
        "received_frames": dict(counters.received_frames),
        "received_bytes": dict(counters.received_bytes),
    }
