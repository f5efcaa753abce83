"""What a node does with each message, and what it says of itself. No sockets and no waiting here.

Runs on the event loop; the compute thread reaches it through `loop.call_soon_threadsafe` alone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import structlog

from shard.compute import ComputeThread
from shard.executor import Executor, Outcome, failure_message
from shard.kv_cache import SessionStore
from shard.peer import Peer, Tensors
from shard.runner import Runner
from shard.settings import KvLimits
from shard.step_queue import QueuedFork, QueuedStep
from shared.clock import Clock
from shared.errors import LinkClosed, MeshError, StepFailed
from shared.layers import LayerRange
from shared.messages import (
    SAMPLING_FIELDS,
    Cancel,
    Drain,
    Error,
    Fork,
    Heartbeat,
    Loaded,
    LoadProgress,
    Message,
    NodeInfo,
    NodeStats,
    Release,
    Step,
    Unsupported,
)

PEER_SILENCE_S_MAX = 60.0
"""A gateway sends a heartbeat every half second; a link silent for so long is dead without having closed."""
KV_MEMORY_SHARE = 0.25
"""Of the memory that is free once the weights are loaded, what sessions may take by default: there may be
other nodes on the machine, and a forward needs room too."""

log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is known of the model before its weights are loaded."""

    fingerprint: str
    name: str
    num_layers: int
    context_len: int = 0


class NodeService:
    """A node's state and its answers.

    Args:
        node_id: Unique in the mesh.
        model: The model it serves.
        layers: The range it holds.
        limits: What it keeps.
        clock: Monotonic time.
    """

    def __init__(self, *, node_id: str, model: ServedModel, layers: LayerRange, limits: KvLimits, clock: Clock) -> None:
        self.model = model
        self.info = NodeInfo(
            node=node_id,
            pid=os.getpid(),
            model=model.fingerprint,
            model_name=model.name,
            layers=layers,
            num_layers=model.num_layers,
            token_ids=layers.end == model.num_layers,
            sampling=SAMPLING_FIELDS,
            kv_cache=limits.enabled,
            kv_ttl_s=limits.ttl_s,
            kv_sessions_max=limits.sessions_max,
            kv_bytes_max=limits.bytes_max or 0,
            context_len=model.context_len,
        )
        self.peers: set[Peer] = set()
        self.store: SessionStore | None = None
        self.answers_discarded = 0
        self._limits = limits
        self._clock = clock
        self._compute: ComputeThread | None = None
        self._executor: Executor | None = None
        self._refusals: Counter[str] = Counter()

    # --- called once each, in this order -----------------------------------------------------

    def attach(self, compute: ComputeThread) -> None:
        """Name the thread that steps go to."""
        self._compute = compute

    def create_executor(self, runner: Runner) -> Executor:
        """What runs steps on a loaded stage. Called on the compute thread."""
        keeps = self._limits.enabled and runner.supports_kv_cache
        bytes_max = self._limits.bytes_max or int(runner.memory_free_bytes() * KV_MEMORY_SHARE)
        self.store = SessionStore(
            ttl_s=self._limits.ttl_s, sessions_max=self._limits.sessions_max, bytes_max=bytes_max, clock=self._clock
        )
        self.info = replace(
            self.info,
            device=runner.device,
            dtype=runner.dtype,
            kv_cache=keeps,
            token_ids=runner.returns_token_ids,
            sampling=runner.sampling_fields,
            features=(*(_session_features(runner) if keeps else ()), *runner.features),
            kv_bytes_max=bytes_max,
            kv_bytes_per_token=runner.kv_bytes_per_token,
            context_len=runner.context_len or self.model.context_len,
            needs_token_ids=runner.needs_token_ids,
            refused_cuts=runner.refused_cuts,
        )
        store = self.store if self._limits.enabled else None
        self._executor = Executor(runner=runner, store=store, model=self.model.fingerprint, clock=self._clock)
        return self._executor

    def become_ready(self) -> None:
        """The stage is loaded: say so on every link."""
        self.info = replace(self.info, state="ready")
        self.broadcast(Loaded(node=self.info))

    def become_failed(self, error: Exception) -> None:
        """Loading has failed: say so, with the reason, on every link."""
        self.info = replace(self.info, state="failed")
        reason = error.message if isinstance(error, MeshError) else f"{type(error).__name__}: {error}"
        self.broadcast(Loaded(node=self.info, error=reason))

    def become_draining(self) -> None:
        """The node is about to leave: take no new session, and say so on every link."""
        self.info = replace(self.info, state="draining")
        if self._executor is not None:
            self._executor.refuses_new_sessions = True
        self.broadcast(Drain())

    # --- peers -------------------------------------------------------------------------------

    def add_peer(self, peer: Peer) -> None:
        """A link has opened. What changed since its welcome was written is said again."""
        self.peers.add(peer)
        if peer.link.welcome.node != self.info:
            peer.send(Loaded(node=self.info))

    def remove_peer(self, peer: Peer) -> None:
        """A link has closed: its waiting steps go, its sessions stay until they expire or are evicted."""
        self.peers.discard(peer)
        dropped = self._compute.drop_link(peer) if self._compute else 0
        if dropped:
            log.info("steps.dropped", peer=peer.name, steps=dropped)

    def broadcast(self, message: Message) -> None:
        """Send to every peer."""
        for peer in list(self.peers):
            peer.send(message)

    def report_progress(self, done_bytes: int, total_bytes: int) -> None:
        """Tell peers how far loading has come."""
        if self.info.state == "loading":
            self.broadcast(LoadProgress(done_bytes=done_bytes, total_bytes=total_bytes))

    def sweep(self) -> None:
        """Apply limits that nobody's message would: expired sessions, silent links."""
        if self.store is not None:
            self.store.sweep()
        silent_since = self._clock.monotonic() - PEER_SILENCE_S_MAX
        for peer in list(self.peers):
            if peer.heard_at < silent_since:
                peer.give_up(LinkClosed("peer_silent", f"the peer said nothing for {PEER_SILENCE_S_MAX} s"))

    # --- messages ----------------------------------------------------------------------------

    def handle(self, peer: Peer, message: Message, tensors: Tensors) -> None:
        """Act on one message of a peer."""
        match message:
            case Step():
                self._submit(QueuedStep(message, tensors, peer, self._clock.monotonic()))
            case Fork():
                self._fork(QueuedFork(message, peer))
            case Heartbeat(reply=False):
                peer.send(Heartbeat(seq=message.seq, reply=True, stats=self.stats()))
            case Release():
                self._end_session(message.session, cancelled=False)
            case Cancel():
                self._end_session(message.session, cancelled=True)
            case Heartbeat() | Drain() | Unsupported() | Error():
                log.debug("message.ignored", peer=peer.name, kind=message.kind)
            case _:
                peer.send(Unsupported(unsupported=message.kind))

    def deliver(self, outcomes: Iterable[Outcome]) -> None:
        """Send answers to where their steps came from; what has left is not answered."""
        for outcome in outcomes:
            peer = outcome.item.link
            if not isinstance(peer, Peer) or not peer.send(outcome.message, outcome.tensors):
                self.answers_discarded += 1

    def stats(self) -> NodeStats:
        """The figures of this moment."""
        sessions, kv_bytes, drops = self.store.figures() if self.store else (0, 0, {})
        figures = self._executor.figures() if self._executor else None
        return NodeStats(
            state=self.info.state,
            sessions=sessions,
            kv_bytes=kv_bytes,
            queued_steps=self._compute.queued if self._compute else 0,
            steps=dict(figures.steps) if figures else {},
            misses=dict(figures.misses) if figures else {},
            evictions=drops,
            errors=dict(figures.errors + self._refusals) if figures else dict(self._refusals),
            busy_us=figures.busy_us if figures else 0,
        )

    def _submit(self, item: QueuedStep) -> None:
        if self._compute is None or self.info.state in ("loading", "failed"):
            self._refuse([item], StepFailed("not_ready", f"the node is {self.info.state}"))
            return
        try:
            superseded = self._compute.submit(item)
        except StepFailed as error:
            self._refuse([item], error)
            return
        if superseded:
            self._refuse(superseded, StepFailed("stale_epoch", f"epoch {item.step.epoch} has replaced this step"))

    def _fork(self, item: QueuedFork) -> None:
        """A fork has no answer: where none is made, the first step of the copy says so."""
        is_ready = self.info.state not in ("loading", "failed")
        if self._compute is None or not is_ready or not self._compute.fork(item):
            code = "queue_full" if is_ready else "not_ready"
            self._refusals[code] += 1
            log.debug("fork.refused", session=item.fork.session, target=item.fork.target, code=code)

    def _end_session(self, session: str, *, cancelled: bool) -> None:
        """Waiting steps first, then the running one, then the session: see `shard.kv_cache`."""
        waiting = self._compute.cancel(session) if self._compute else []
        if self.store is not None:
            self.store.release(session, "cancelled" if cancelled else "released")
        self._refuse(waiting, StepFailed("cancelled", "the session was ended"))

    def _refuse(self, items: Iterable[QueuedStep], error: StepFailed) -> None:
        for item in items:
            self._refusals[error.code] += 1
            self.deliver([Outcome(item, failure_message(item.step, error))])


def _session_features(runner: Runner) -> tuple[str, ...]:
    """What a node that keeps sessions can do with them."""
    return ("fork", "rewind") if runner.rewinds else ("fork",)
