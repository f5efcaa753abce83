"""What a node does with each message, and what it says of itself. No sockets and no waiting here.

Runs on the event loop; the compute thread reaches it through `loop.call_soon_threadsafe` alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import structlog

from shard.assignment import Assignment, LoadRange, ServedModel
from shard.executor import Outcome, failure_message
from shard.peer import Peer, Tensors, payload_bytes
from shard.range_keeper import RangeKeeper
from shard.room import MemoryBudget
from shard.settings import KvLimits
from shard.shares import Shares
from shard.step_queue import QueuedFork, QueuedStep
from shared.clock import Clock
from shared.errors import LinkClosed, StepFailed
from shared.messages import (
    PROBE_BYTES_MAX,
    Cancel,
    Drain,
    Error,
    Fork,
    Heartbeat,
    Load,
    Loaded,
    MachineInfo,
    Message,
    NodeInfo,
    NodeState,
    NodeStats,
    Probe,
    Release,
    Step,
    Unload,
    Unsupported,
)

SWEEP_INTERVAL_S = 1.0
"""How often expired sessions and silent links are looked for."""

log = structlog.stdlib.get_logger(__name__)


class NodeService:
    """A node's state and its answers. Needs a running event loop.

    Args:
        node_id: Unique in the mesh.
        limits: What it keeps.
        clock: Monotonic time.
        load: Loads a range.
        machine: What it offers, if it takes whatever range a gateway gives it.
    """

    def __init__(
        self,
        *,
        node_id: str,
        limits: KvLimits,
        clock: Clock,
        load: LoadRange,
        machine: MachineInfo | None = None,
    ) -> None:
        self.node_id = node_id
        self.machine = machine
        self.peers: set[Peer] = set()
        self.answers_discarded = 0
        self.on_drain_asked: Callable[[], None] = lambda: None
        self.load_error: str | None = None
        self.on_load_failed: Callable[[], None] = lambda: None
        budget = MemoryBudget(machine.memory_bytes, machine.runtime_bytes) if machine else None
        self.keeper = RangeKeeper(self, node_id=node_id, limits=limits, clock=clock, load=load, budget=budget)
        self._clock = clock
        self._refusals: Counter[str] = Counter()
        self._swept_at = clock.monotonic()
        self._shares = Shares()

    @property
    def info(self) -> NodeInfo | None:
        """What it says of the range it holds; None while it holds none."""
        return self.keeper.held.info if self.keeper.held else None

    @property
    def state(self) -> NodeState:
        """Whether steps are served; a node without a range is about to be given one."""
        if self.keeper.is_draining:
            return "draining"
        return self.info.state if self.info else "loading"

    def become_draining(self) -> None:
        """The node is about to leave: take no new session, and say so on every link."""
        self.keeper.drain()
        self.broadcast(Drain())

    # --- peers -------------------------------------------------------------------------------

    async def serve(self, peer: Peer, *, described: NodeInfo | None) -> None:
        """Keep a link that has just opened until it ends.

        Args:
            peer: The other side.
            described: What the handshake said of this node; what has changed since is said again.

        Raises:
            MeshError: Why the link ended.
        """
        self.peers.add(peer)
        if self.info is not None and described != self.info:
            peer.send(Loaded(node=self.info))
        if self.keeper.is_draining:
            peer.send(Drain())
        try:
            await peer.run()
        finally:
            self._remove_peer(peer)

    def _remove_peer(self, peer: Peer) -> None:
        """A link has closed: its waiting steps go, its sessions stay until they expire or are evicted."""
        self.peers.discard(peer)
        self._shares.forget(peer)
        held = self.keeper.held
        dropped = held.compute.drop_link(peer) if held else 0
        if dropped:
            log.info("steps.dropped", peer=peer.name, steps=dropped)

    def broadcast(self, message: Message) -> None:
        """Send to every peer."""
        for peer in list(self.peers):
            peer.send(message)

    def send_to(self, names: Iterable[str], message: Message) -> None:
        """Send to the peers of these names."""
        wanted = set(names)
        for peer in [peer for peer in self.peers if peer.name in wanted]:
            peer.send(message)

    def is_linked(self, name: str) -> bool:
        """Whether a peer of this name has a link."""
        return any(peer.name == name for peer in self.peers)

    def on_failed(self, reason: str) -> None:
        """A range could not be loaded."""
        self.load_error = reason
        self.on_load_failed()

    def sweep(self) -> None:
        """Apply limits that nobody's message would: expired sessions, silent links. Call it every `SWEEP_INTERVAL_S`.

        A sweep that comes late says that this process was held up, and what peers sent meanwhile has not been read.
        """
        if self.keeper.held is not None:
            self.keeper.held.sweep()
        now = self._clock.monotonic()
        is_late, self._swept_at = now - self._swept_at > 2 * SWEEP_INTERVAL_S, now
        for peer in [] if is_late else list(self.peers):
            if now - peer.heard_at > peer.silence_s_max:
                peer.give_up(LinkClosed("peer_silent", f"the peer said nothing for {peer.silence_s_max} s"))

    # --- messages ----------------------------------------------------------------------------

    def handle(self, peer: Peer, message: Message, tensors: Tensors) -> None:
        """Act on one message of a peer."""
        match message:
            case Step():
                self._submit(QueuedStep(message, tensors, peer, self._clock.monotonic()))
            case Fork():
                self._fork(QueuedFork(message, peer))
            case Heartbeat(reply=False) | Probe(reply=False):
                self._answer_at_once(peer, message, tensors)
            case Release():
                self._end_session(message.session, cancelled=False)
            case Cancel():
                self._end_session(message.session, cancelled=True)
            case Load() if self.machine is not None:
                self._load(peer, message)
            case Unload() if self.machine is not None:
                self.keeper.unload(peer.name)
            case Drain() if peer.is_gateway:
                log.info("drain.asked", gateway=peer.name)
                self.on_drain_asked()
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

    def submit_again(self, steps: Iterable[QueuedStep]) -> None:
        """Give steps that waited for a range that is gone to what is held now: they are answered."""
        for item in steps:
            self._submit(item)

    def stats(self) -> NodeStats:
        """The figures of this moment."""
        figures, held = self.keeper.figures(), self.keeper.held
        memory_bytes, limit_bytes, weights_bytes = held.memory_figures() if held else (0, 0, 0)
        if self.machine is not None:
            limit_bytes = min(limit_bytes or self.machine.memory_bytes, self.machine.memory_bytes)
        return NodeStats(
            state=self.state,
            sessions=figures.sessions,
            kv_bytes=figures.kv_bytes,
            queued_steps=figures.queued_steps,
            steps=dict(figures.steps.steps),
            misses=dict(figures.steps.misses),
            evictions=dict(figures.drops),
            errors=dict(figures.steps.errors + self._refusals),
            busy_us=figures.steps.busy_us,
            memory_bytes=memory_bytes,
            memory_limit_bytes=limit_bytes,
            weights_bytes=weights_bytes,
        )

    def _answer_at_once(self, peer: Peer, asked: Heartbeat | Probe, tensors: Tensors) -> None:
        if isinstance(asked, Heartbeat):
            peer.send(self._heartbeat(peer, asked))
        elif payload_bytes(tensors) <= PROBE_BYTES_MAX:
            peer.send(Probe(seq=asked.seq, reply=True), tensors)
        else:
            peer.send(Unsupported(unsupported=asked.kind))

    def _heartbeat(self, peer: Peer, asked: Heartbeat) -> Heartbeat:
        store = self.keeper.held.store if self.keeper.held else None
        granted = None
        if asked.sessions is not None and store is not None:
            granted = self._shares.ask(peer, asked.sessions, asked.waiting, store.sessions_max)
        return Heartbeat(seq=asked.seq, reply=True, stats=self.stats(), granted=granted)

    def _load(self, peer: Peer, load: Load) -> None:
        model = ServedModel(load.model, load.model_name, load.num_layers)
        for answer in self.keeper.load(Assignment(model, load.layers, peer.url_of(load.files)), peer.name):
            peer.send(answer)

    def _submit(self, item: QueuedStep) -> None:
        held = self.keeper.held
        if held is None or not held.can_serve:
            self._refuse([item], StepFailed("not_ready", self._excuse()))
            return
        try:
            superseded = held.compute.submit(item)
        except StepFailed as error:
            self._refuse([item], error)
            return
        if superseded:
            self._refuse(superseded, StepFailed("stale_epoch", f"epoch {item.step.epoch} has replaced this step"))

    def _excuse(self) -> str:
        return f"the node is {self.info.state}" if self.info else "the node holds no layers"

    def _fork(self, item: QueuedFork) -> None:
        """A fork has no answer: where none is made, the first step of the copy says so."""
        held = self.keeper.held
        can_serve = held is not None and held.can_serve
        if held is None or not can_serve or not held.compute.fork(item):
            code = "queue_full" if can_serve else "not_ready"
            self._refusals[code] += 1
            log.debug("fork.refused", session=item.fork.session, target=item.fork.target, code=code)

    def _end_session(self, session: str, *, cancelled: bool) -> None:
        """Waiting steps first, then the running one, then the session: see `shard.kv_cache`."""
        held = self.keeper.held
        if held is None:
            return
        waiting = held.compute.cancel(session)
        if held.store is not None:
            held.store.release(session, "cancelled" if cancelled else "released")
        self._refuse(waiting, StepFailed("cancelled", "the session was ended"))

    def _refuse(self, items: Iterable[QueuedStep], error: StepFailed) -> None:
        for item in items:
            self._refusals[error.code] += 1
            self.deliver([Outcome(item, failure_message(item.step, error))])
