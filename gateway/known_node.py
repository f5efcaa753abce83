"""What a node says of itself, and what its steps have taken: all that outlives one link to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import structlog

from gateway.observed import AloneSteps, Observed
from gateway.open_link import OpenLink
from gateway.pacing import Pace
from gateway.waits import Wait
from shared.errors import MeshError
from shared.messages import Loaded, LoadProgress, MachineInfo, NodeInfo, NodeState, NodeStats, StepResult

log = structlog.stdlib.get_logger(__name__)


class KnownNode:
    """One node.

    Args:
        url: Where the node listens; of one that has joined, where it came from.
        on_change: Called whenever the node's description has changed. Must not raise.
        joined: It dialled us.

    Attributes:
        pid: Of the node's process, 0 while that is not known. It stays known while the node changes its range.
        info: What it says of its range; None while it holds none.
    """

    def __init__(self, url: str, *, on_change: Callable[[], None], joined: bool) -> None:
        self.url = url
        self.joined = joined
        self.node: str | None = None
        self.pid = 0
        self.info: NodeInfo | None = None
        self.machine: MachineInfo | None = None
        self.stats: NodeStats | None = None
        self.pace = Pace()
        self.observed = Observed()
        self.alone = AloneSteps()
        self.round_trip_s: float | None = None
        self.round_trip_min_s: float | None = None
        self.bytes_per_s: float | None = None
        self.load_progress: tuple[int, int] | None = None
        self.load_error: str | None = None
        self.last_error: MeshError | None = None
        self.drains = False
        self._on_change = on_change

    @property
    def name(self) -> str:
        """The node's id, once it has said it, and its address."""
        return f"{self.node} ({self.url})" if self.node is not None else self.url

    @property
    def described(self) -> dict[str, object]:
        """For logs."""
        info = self.info
        if info is None:
            return {} if self.node is None else {"node": self.node, "layers": None}
        return {"node": info.node, "pid": info.pid, "layers": str(info.layers), "state": info.state}

    def introduce(self, link: OpenLink) -> None:
        """Take in what a node has said at the handshake."""
        known = self.info
        self.node, self.machine = link.peer, link.peer_machine
        # A machine that holds no range says so by saying nothing of one.
        self.info = link.peer_node or (None if self.machine is not None else self.info)
        self.pid = self.info.pid if self.info else 0
        self.drains = self.info is not None and self.info.state == "draining"
        if known is None or self.info is None or (self.info.pid, self.info.layers) != (known.pid, known.layers):
            self._measure_anew()
            self.stats = None

    def forget_range(self) -> None:
        """What it holds is about to change: nothing may be asked of it until it says what it holds."""
        self.info, self.load_progress, self.load_error = None, None, None
        self._on_change()

    def note_failure(self, error: MeshError) -> None:
        """No link came about."""
        if self.last_error is None or self.last_error.code != error.code:
            log.warning("node.unreachable", url=self.url, code=error.code, reason=error.message)
        self.last_error = error

    def note_step(self, wait: Wait, result: StepResult, now_s: float) -> None:
        """A step was answered."""
        took_s = now_s - wait.asked_at
        working_s = max(took_s - result.queue_us / 1e6, result.compute_us / 1e6)
        self.pace.record(wait.step.new_len, working_s)
        if wait.step.cache == "decode" and wait.step.new_len == 1:
            self.observed.record(now_s, compute_us=result.compute_us, queue_us=result.queue_us, took_s=took_s)
            if wait.is_alone:
                self.alone.record(result.compute_us / 1e6)

    def note_round_trip(self, seconds: float) -> None:
        """A heartbeat was answered."""
        self.round_trip_s = seconds
        self.round_trip_min_s = min(seconds, self.round_trip_min_s or seconds)

    def take_stats(self, stats: NodeStats) -> bool:
        """Take in a heartbeat's figures; returns whether the node has worked since the last ones."""
        has_worked = self.stats is not None and _work_of(stats) != _work_of(self.stats)
        self.stats = stats
        self.take_state(stats.state)
        return has_worked

    def take_state(self, state: NodeState) -> None:
        """The node says that it is in this state."""
        if self._note_drain(state):
            self._on_change()
        if self.info is not None and self.info.state != state:
            self._take_info(replace(self.info, state=state))

    def take_loaded(self, message: Loaded) -> None:
        """The node's description has changed."""
        self.load_error = message.error
        self._take_info(message.node)

    def take_progress(self, message: LoadProgress) -> None:
        """The node is loading."""
        self.load_progress = (message.done_bytes, message.total_bytes)

    def _take_info(self, info: NodeInfo) -> None:
        if self.info is None or self.info.layers != info.layers:
            self._measure_anew()
        self.info, self.pid = info, info.pid
        self._note_drain(info.state)
        if info.state != "loading":
            self.load_progress = None
        log.info("node.changed", url=self.url, **self.described)
        self._on_change()

    def _note_drain(self, state: NodeState) -> bool:
        """Whether it is to go is what it has said last; a node that loads says nothing of that. True if it changed."""
        changes = state in {"draining", "ready"} and self.drains != (state == "draining")
        self.drains ^= changes
        return changes

    def _measure_anew(self) -> None:
        """Of another range nothing counts here; what it showed of an average layer `gateway.fleet.members` keeps."""
        self.pace = Pace()
        self.observed.clear()
        self.alone = AloneSteps()


def _work_of(stats: NodeStats) -> tuple[int, int]:
    return stats.busy_us, sum(stats.steps.values())
