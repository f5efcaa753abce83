"""Which range a node holds, and how that changes: `Load`, `Unload`, and the change from one range to the next.

Theory of operation. `held` is what steps go to; `next` is what is being loaded, by the compute thread of its own.
Where nothing serves, both are the same. A change goes one of two ways:

- There is room for both ranges' weights: `held` serves until `next` is ready, then they change places.
- There is not: once the weights are on the disk and only have to be read, `held` goes first, and steps are
  answered with `not_ready` for as long as reading takes.

What is left of a range (`leaving`) ends its running step; nothing is read before the memory of those is back.
Sessions never move: a step that continues one of the old range is a `cache_miss`, and its gateway rebuilds it.

A node may have joined several gateways. The first that asks has the say for as long as it is linked; another
one may ask for the same range, and has the say when the first is gone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

import structlog

from shard.assignment import Assignment, LoadRange, describe
from shard.executor import Outcome
from shard.held_range import HeldRange, RangeFigures
from shard.room import MemoryBudget, Room
from shard.settings import KvLimits
from shard.step_queue import QueuedStep
from shared.clock import Clock
from shared.errors import LoadFailed
from shared.messages import Loaded, LoadProgress, Message

RUNNING_STEP_S_MAX = 10.0
"""How long the running step of a range that leaves may take; then it is cancelled between layers."""
LEAVE_S_MAX = 30.0
"""How long a range that leaves may take from then on; a thread that is stuck longer keeps its memory for ever."""

log = structlog.stdlib.get_logger(__name__)


class KeepersNode(Protocol):
    """What the keeper asks of the node, on the event loop."""

    def broadcast(self, message: Message) -> None:
        """Send to every peer."""
        ...

    def send_to(self, names: Iterable[str], message: Message) -> None:
        """Send to the peers of these names."""
        ...

    def is_linked(self, name: str) -> bool:
        """Whether a peer of this name has a link."""
        ...

    def deliver(self, outcomes: Iterable[Outcome]) -> None:
        """Answer steps."""
        ...

    def submit_again(self, steps: Iterable[QueuedStep]) -> None:
        """Give steps to what is held now, whose range they do not name: they are answered."""
        ...

    def on_failed(self, reason: str) -> None:
        """A range could not be loaded."""
        ...


class RangeKeeper:
    """Holds one range, or none, and changes it. Needs a running event loop.

    Args:
        node: Whose ranges these are.
        node_id: Its id.
        limits: What is kept of sessions.
        clock: Monotonic time.
        load: Loads a range.
        budget: What may be used of the machine; None where one range is held for ever, as far as memory goes.

    Attributes:
        held: What steps go to.
        next: What is being loaded.
        is_draining: No new session is taken.
        settled: Set while nothing is being loaded.
    """

    def __init__(
        self,
        node: KeepersNode,
        *,
        node_id: str,
        limits: KvLimits,
        clock: Clock,
        load: LoadRange,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.held: HeldRange | None = None
        self.next: HeldRange | None = None
        self.is_draining = False
        self.settled = asyncio.Event()
        self.settled.set()
        self._node = node
        self._node_id = node_id
        self._limits = limits
        self._clock = clock
        self._load = load
        self._budget = budget
        self._askers: list[str] = []
        self._leaving: list[HeldRange] = []
        self._past = RangeFigures()

    @property
    def owner(self) -> str | None:
        """The gateway that has the say: the first that asked for what is held, of those that are linked."""
        return next(filter(self._node.is_linked, self._askers), None)

    @property
    def ranges(self) -> list[HeldRange]:
        """All that have a thread."""
        return list({id(held): held for held in (self.held, self.next, *self._leaving) if held}.values())

    def figures(self) -> RangeFigures:
        """Of all ranges since the node's start; what is held is of this moment."""
        return _added(self._past, self.held.figures()) if self.held else self._past

    # --- what is asked -----------------------------------------------------------------------

    def load(self, assignment: Assignment, asker: str) -> list[Loaded]:
        """Hold this range from now on. Returns what is answered at once; what comes of the rest, all peers are told."""
        refusal = self._refusal(assignment, asker)
        if refusal is not None:
            log.warning("load.refused", gateway=asker, layers=str(assignment.layers), reason=refusal)
            return self._failed(assignment, refusal)
        target = self._wanted_already(assignment)
        if target is None:
            self._askers = [asker]
            self.begin(assignment)
            return []
        if asker not in self._askers:
            self._askers = [*filter(self._node.is_linked, self._askers), asker]
        if target is self.held and target is not self.next:
            self._give_up_next()
            return [Loaded(node=target.info)]
        return []

    def unload(self, asker: str) -> None:
        """Give the range and its memory back."""
        if self.owner not in (None, asker):
            log.warning("unload.refused", gateway=asker, owner=self.owner)
            return
        self._give_up_next()
        self._askers = []
        if self.held is not None:
            log.info("node.unloaded", layers=str(self.held.info.layers), gateway=asker)
            left, self.held = self.held, None
            self._retire(left)

    def begin(self, assignment: Assignment) -> None:
        """Load a range, whatever was being loaded before."""
        self._give_up_next()
        self.settled.clear()
        self.next = HeldRange(
            assignment,
            node_id=self._node_id,
            limits=self._limits,
            clock=self._clock,
            load=self._load,
            events=self,
        )
        log.info("node.loading", layers=str(assignment.layers), model=assignment.model.name)
        if self.held is None or not self.held.can_serve:
            self.held = self.next
        self.next.start()

    def drain(self) -> None:
        """Take no new session, and load nothing more."""
        self.is_draining = True
        if self.held is not self.next:
            self._give_up_next()
        if self.held is not None:
            self.held.become_draining()

    def stop(self) -> None:
        """End every thread as soon as it notices. Does not wait."""
        for held in self.ranges:
            held.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for each thread for so long. Blocks; returns whether all have ended."""
        return all(held.compute.join(timeout_s) for held in self.ranges)

    # --- what ranges tell --------------------------------------------------------------------

    def make_room(self, held: HeldRange, weight_bytes: int, measure: Callable[[], Room]) -> None:
        """On the compute thread of `held`: return once its weights may be read.

        Raises:
            LoadFailed: `out_of_memory`: they do not fit, whatever goes.
        """
        if self._budget is None:
            return
        held.kv_room_bytes = self._budget.session_bytes(weight_bytes)
        self._budget.check_alone(weight_bytes)
        self._await_leaving(held)
        if self._budget.fits_beside(weight_bytes, measure()):
            return
        made = threading.Event()
        held.call(lambda: self._make_way(held, made))
        if not made.wait(LEAVE_S_MAX):
            raise LoadFailed("out_of_memory", f"the event loop did not answer for {LEAVE_S_MAX} s")
        self._await_leaving(held)
        self._budget.check_now(weight_bytes, measure())

    def on_progress(self, held: HeldRange, done_bytes: int, total_bytes: int) -> None:
        """Tell peers how far fetching, and then reading, has come."""
        if held is self.next:
            self._node.broadcast(LoadProgress(done_bytes=done_bytes, total_bytes=total_bytes))

    def on_loaded(self, held: HeldRange, error: str | None) -> None:
        """What was being loaded is, or will not be."""
        if held is not self.next:
            return
        self.next = None
        self.settled.set()
        if error is not None:
            self._fail(held, error)
            return
        held.become_ready()
        if self.is_draining:
            held.become_draining()
        self._put_in_place(held)
        self._node.broadcast(Loaded(node=held.info))

    def deliver(self, outcomes: list[Outcome]) -> None:
        """Answers to steps."""
        self._node.deliver(outcomes)

    # --- how it changes ----------------------------------------------------------------------

    def _refusal(self, assignment: Assignment, asker: str) -> str | None:
        if self.is_draining:
            return "the node is leaving"
        if assignment.layers.end > assignment.model.num_layers:
            return f"layers {assignment.layers} end after the last of {assignment.model.num_layers}"
        target = self.next or self.held
        is_wanted = target is not None and target.assignment.is_same_range(assignment)
        if self.owner not in (None, asker) and not is_wanted:
            return f"held for gateway {self.owner}"
        return None

    def _wanted_already(self, assignment: Assignment) -> HeldRange | None:
        """The range that is asked for, if it is being loaded or is held."""
        for held in (self.next, self.held):
            if held and held.assignment.is_same_range(assignment) and held.info.state != "failed":
                return held
        return None

    def _failed(self, assignment: Assignment, reason: str) -> list[Loaded]:
        """That this range will not come, and why; and then what is still held."""
        info = replace(describe(assignment, self._node_id, self._limits), state="failed")
        failed = Loaded(node=info, error=reason)
        return [failed, Loaded(node=self.held.info, error=reason)] if self.held else [failed]

    def _fail(self, held: HeldRange, reason: str) -> None:
        held.become_failed()
        if held is self.held:
            self._node.broadcast(Loaded(node=held.info, error=reason))
        else:
            for answer in self._failed(held.assignment, reason):
                self._node.send_to(self._askers, answer)
        self._node.on_failed(reason)

    def _give_up_next(self) -> None:
        if self.next is None:
            return
        log.info("load.given_up", layers=str(self.next.assignment.layers))
        given_up, self.next = self.next, None
        self.settled.set()
        if given_up is self.held:
            self.held = None
        given_up.stop()
        self._leave(given_up)

    def _make_way(self, held: HeldRange, made: threading.Event) -> None:
        if held is self.next and held is not self.held:
            self._put_in_place(held)
            self._node.broadcast(Loaded(node=held.info))
        made.set()

    def _put_in_place(self, held: HeldRange) -> None:
        left, self.held = self.held, held
        if left is not None and left is not held:
            self._retire(left)

    def _retire(self, held: HeldRange) -> None:
        self._past = _added(self._past, replace(held.figures(), sessions=0, kv_bytes=0, queued_steps=0))
        waiting = held.compute.retire()
        self._leave(held)
        self._node.submit_again(waiting)

    def _leave(self, held: HeldRange) -> None:
        held.release_references()
        self._leaving = [other for other in self._leaving if not other.compute.join(0)]
        self._leaving.append(held)

    def _await_leaving(self, held: HeldRange) -> None:
        for left in list(self._leaving):
            if left is held or left.compute.join(RUNNING_STEP_S_MAX):
                continue
            left.stop()
            if not left.compute.join(LEAVE_S_MAX):
                raise LoadFailed("out_of_memory", f"layers {left.assignment.layers} do not give their memory back")


def _added(one: RangeFigures, other: RangeFigures) -> RangeFigures:
    return RangeFigures(
        sessions=one.sessions + other.sessions,
        kv_bytes=one.kv_bytes + other.kv_bytes,
        queued_steps=one.queued_steps + other.queued_steps,
        drops=one.drops + other.drops,
        steps=one.steps.added(other.steps),
    )
