"""Steps that wait for the compute thread, and which of them run next.

Short steps (decoding) go before long ones (prefill chunks), because a stream that waits for one token
notices a chunk's duration while a prefill hardly notices a token's. So that a prefill still ends when
many streams decode, after `SHORT_STEPS_PER_LONG` short steps one long step runs. Steps of one session
keep their order: behind a waiting long step all later steps of its session are treated as long.

Where several gateways have steps in a lane, they take turns: one step of each, whoever has more waiting.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shared.errors import StepFailed
from shared.messages import Fork, Step
from shared.tensor_spec import WireTensor

SHORT_POSITIONS_MAX = 16
"""A step of at most this many positions is short: one token, or one token with drafts."""
SHORT_STEPS_PER_LONG = 8
"""How many short steps may pass a waiting long one."""
QUEUED_STEPS_MAX = 256
"""More sessions than a node can hold, each with a step waiting."""
QUEUED_BYTES_MAX = 512 * 1024 * 1024
"""Received tensors that wait; twice the largest payload of one frame."""
LINKS_REMEMBERED_MAX = 64
"""Whose last turn is remembered; more gateways than any node serves, so that links which are gone take no memory."""


@dataclass(slots=True, eq=False)
class QueuedStep:
    """A step on its way through the node.

    Args:
        step: What was asked.
        tensors: Its inputs, views into the received frame.
        link: Identifies where the answer goes; compared by identity.
        arrived_at: Monotonic seconds.
        cancelled: Turned true by whoever no longer wants the answer; never turned back.
        cancel_code: The code of the answer in that case.
        nbytes: Bytes of received tensors that it keeps alive.
    """

    step: Step
    tensors: Mapping[str, WireTensor]
    link: object
    arrived_at: float
    cancelled: bool = False
    cancel_code: str = "cancelled"
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(tensor.data.nbytes for tensor in self.tensors.values())

    def cancel(self, code: str) -> None:
        """Ask for the step to stop at the next layer, to be answered with this error code."""
        if not self.cancelled:
            self.cancel_code = code
            self.cancelled = True


@dataclass(slots=True, eq=False)
class QueuedFork:
    """A fork on its way to the compute thread.

    Args:
        fork: What was asked.
        link: Who asked; compared by identity.
        cancelled: Turned true when the copy was released before it was made; never turned back.
    """

    fork: Fork
    link: object
    cancelled: bool = False


class StepQueue:
    """Two lanes of waiting steps, bounded by number and by bytes."""

    def __init__(self, *, steps_max: int = QUEUED_STEPS_MAX, bytes_max: int = QUEUED_BYTES_MAX) -> None:
        self._steps_max = steps_max
        self._bytes_max = bytes_max
        self._short: deque[QueuedStep] = deque()
        self._long: deque[QueuedStep] = deque()
        self._long_sessions: Counter[str] = Counter()
        self._nbytes = 0
        self._shorts_in_a_row = 0
        self._turns = 0
        self._served_at: dict[int, int] = {}  # by the link's id(): it must not keep a closed link alive

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def offer(self, item: QueuedStep) -> None:
        """Queue a step.

        Raises:
            StepFailed: `queue_full`, naming the limit.
        """
        nbytes = item.nbytes
        if len(self) >= self._steps_max:
            raise _full("steps", self._steps_max)
        if self._nbytes + nbytes > self._bytes_max:
            raise _full("bytes of waiting steps", self._bytes_max)
        self._nbytes += nbytes
        if item.step.new_len > SHORT_POSITIONS_MAX or self._long_sessions[item.step.session]:
            self._long_sessions[item.step.session] += 1
            self._long.append(item)
        else:
            self._short.append(item)

    def take(self, steps_max: int) -> list[QueuedStep]:
        """Remove the steps to run next, at most `steps_max` and at most one of each session."""
        taken: list[QueuedStep] = []
        sessions: set[str] = set()
        while len(taken) < steps_max:
            item = self._next(sessions)
            if item is None:
                break
            taken.append(item)
            sessions.add(item.step.session)
        return taken

    def drop(self, unwanted: Callable[[QueuedStep], bool]) -> list[QueuedStep]:
        """Remove and return every waiting step for which `unwanted` is true."""
        dropped = [item for lane in (self._short, self._long) for item in lane if unwanted(item)]
        for item in dropped:
            self._forget(item)
        return dropped

    def _next(self, sessions: set[str]) -> QueuedStep | None:
        long_is_due = bool(self._long) and self._shorts_in_a_row >= SHORT_STEPS_PER_LONG
        lanes = (self._long, self._short) if long_is_due else (self._short, self._long)
        for lane in lanes:
            item = self._longest_unserved(lane, sessions)
            if item is not None:
                self._shorts_in_a_row = self._shorts_in_a_row + 1 if lane is self._short and self._long else 0
                self._note_turn(item.link)
                self._forget(item)
                return item
        return None

    def _longest_unserved(self, lane: deque[QueuedStep], sessions: set[str]) -> QueuedStep | None:
        """The oldest step of the gateway whose last turn is longest ago, of a session that has none yet."""
        waiting = (item for item in lane if item.step.session not in sessions)
        return min(waiting, key=lambda item: self._served_at.get(id(item.link), 0), default=None)

    def _note_turn(self, link: object) -> None:
        self._turns += 1
        self._served_at[id(link)] = self._turns
        if len(self._served_at) > LINKS_REMEMBERED_MAX:
            del self._served_at[min(self._served_at, key=self._served_at.__getitem__)]

    def _forget(self, item: QueuedStep) -> None:
        self._nbytes -= item.nbytes
        if item in self._short:
            self._short.remove(item)
            return
        self._long.remove(item)
        self._long_sessions[item.step.session] -= 1
        if not self._long_sessions[item.step.session]:
            del self._long_sessions[item.step.session]


def _full(what: str, limit: int) -> StepFailed:
    return StepFailed("queue_full", f"the node's queue is full: the limit is {limit} {what}", limit=limit)
