"""One configured node: its link, kept up for ever, and the steps that wait for its answers.

Theory of operation. While a link is open three tasks serve it: one reads and hands each answer to
whoever waits for it, one writes what `ask` and `post` have put into the outbox, and one ticks. Neither
`ask` nor `post` ever touches the socket, so cancelling a caller leaves no half-sent frame, and what a
caller posts while being cancelled still leaves. Answers are matched by (session, step_index, epoch); one
that nobody waits for (a late one) is dropped and counted.

No wait has a timer of its own: the tick looks at all of them, four times a second, so a decoded token
costs no timer. `gateway.liveness` says when the link is to be closed for silence, which ends all waits
with `LinkClosed`, and which waits have met a stalled node.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from gateway.liveness import TICK_S, Liveness
from gateway.open_link import Dial, OpenLink, add_counters
from gateway.pacing import Pace
from gateway.waiting import wait_first
from gateway.waits import Answer, Wait, Waits
from shared.backoff import Backoff
from shared.clock import Clock
from shared.errors import DeadlineExceeded, FrameError, LinkClosed, MeshError
from shared.link import LinkCounters
from shared.messages import (
    CacheMiss,
    Cancel,
    Drain,
    Error,
    Fork,
    Heartbeat,
    Hello,
    Loaded,
    LoadProgress,
    Message,
    NodeInfo,
    NodeState,
    NodeStats,
    Release,
    Step,
    StepResult,
)
from shared.tensor_spec import WireTensor

TICKS_PER_HEARTBEAT = 2
"""A heartbeat every 0.5 s."""
NEIGHBOUR_STEP_TOKENS = 256
"""Size of the steps that other gateways are assumed to have queued at a busy node."""
OUTBOX_MESSAGES_MAX = 4096
"""Far more than admitted sessions can have under way; over it the node does not read, and its link is closed."""
UNSENT_MAX = 256
"""Releases and cancels kept for a process whose link is down; beyond, its TTL frees the sessions."""
LAST_WORDS_S = 1.0
"""How long a gateway that stops goes on telling a node which sessions have ended."""
HEARTBEATS_OPEN_MAX = 64
"""Heartbeats whose answers are awaited; the silence limit closes the link long before."""

log = structlog.stdlib.get_logger(__name__)


@dataclass(slots=True)
class _Beat:
    """A heartbeat that has been asked and not been answered."""

    asked_at: float
    sent_mark: int
    answered: asyncio.Future[None] | None


@dataclass(slots=True)
class _Unsent:
    """Releases and cancels that wait for a process to come back into reach."""

    pid: int = 0
    messages: deque[Message] = field(default_factory=lambda: deque(maxlen=UNSENT_MAX))


class NodeLink:
    """Dials one node again and again, and asks it steps while the link is open.

    Args:
        url: Where the node listens.
        hello: What the gateway says of itself.
        dial: Opens a link.
        clock: Time.
        backoff: Delays between attempts.
        on_change: Called whenever the node's description or reachability has changed. Must not raise.
    """

    def __init__(
        self,
        url: str,
        *,
        hello: Hello,
        dial: Dial,
        clock: Clock,
        backoff: Backoff,
        on_change: Callable[[], None],
    ) -> None:
        self.url = url
        self.info: NodeInfo | None = None
        self.stats: NodeStats | None = None
        self.pace = Pace()
        self.connects = 0
        self.round_trip_s: float | None = None
        self.load_progress: tuple[int, int] | None = None
        self.last_error: MeshError | None = None
        self._hello = hello
        self._dial = dial
        self._clock = clock
        self._backoff = backoff
        self._on_change = on_change
        self._link: OpenLink | None = None
        self._waits = Waits()
        self._beats: dict[int, _Beat] = {}
        self._beat_seq = 0
        self._outbox: deque[tuple[Message, Mapping[str, WireTensor] | None, Wait | None]] = deque()
        self._outbox_filled = asyncio.Event()
        self._writer_rests = False
        self._unsent = _Unsent()
        self._past_counters = LinkCounters()
        self._liveness = Liveness()

    @property
    def is_open(self) -> bool:
        """Whether steps can be asked now."""
        return self._link is not None

    @property
    def name(self) -> str:
        """The node's id, once it has said it, and its address."""
        return f"{self.info.node} ({self.url})" if self.info is not None else self.url

    @property
    def waiting(self) -> int:
        """Steps asked and not yet answered."""
        return len(self._waits)

    @property
    def late_answers(self) -> int:
        """Answers that came when nobody waited for them any more."""
        return self._waits.late_answers

    def counters(self) -> LinkCounters:
        """Frames and bytes of all links there have been to this node."""
        total = LinkCounters()
        add_counters(total, self._past_counters)
        if self._link is not None:
            add_counters(total, self._link.counters)
        return total

    async def ask(self, step: Step, tensors: Mapping[str, WireTensor], *, patience: float = 1.0) -> Answer:
        """Send a step and wait for its answer. Cancelling is safe; the answer is then dropped.

        Args:
            step: Its (session, step_index, epoch) must not be waited for already.
            tensors: Must not change until the answer is there.
            patience: Multiplies a deadline that was measured; raised after a deadline that may have been too short.

        Raises:
            CacheMissed: The node does not hold what the step continues.
            StepFailed: The node could not serve it; the code is the node's.
            LinkClosed: There is no link, or it closed meanwhile.
            DeadlineExceeded: The node made no progress for too long.
            FrameError: The step is over the frame's limits; nothing was sent.
        """
        payload_bytes = sum(tensor.data.nbytes for tensor in tensors.values())
        allowance_s = self.pace.allowance_s(step.new_len, payload_bytes, patience=patience)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        sent_mark = self._liveness.note_sent(payload_bytes)
        wait = Wait(step, answer, self._clock.monotonic(), self._liveness.now_s, allowance_s, sent_mark)
        self._waits.add(wait)
        try:
            self._put(step, tensors, wait)
            return await answer
        finally:
            self._waits.remove(wait)
            if answer.cancelled():
                self._liveness.note_forsaken(allowance_s)

    def post(self, message: Release | Cancel | Fork) -> None:
        """Send without waiting. When the link is down, what ends a session is kept for the process to come back."""
        if self._link is not None:
            self._put(message, None, None)
        elif isinstance(message, Fork):
            return
        elif self.info is not None and self._unsent.pid == self.info.pid:
            self._unsent.messages.append(message)

    async def measure(self) -> None:
        """Ask for a heartbeat and wait until `stats` and `round_trip_s` are current.

        Raises:
            LinkClosed: There is no link, or it closed meanwhile.
        """
        answered = asyncio.get_running_loop().create_future()
        self._beat(answered)
        await answered

    async def run(self) -> None:
        """Keep the link up until cancelled, whatever goes wrong with it: other nodes' links must not end with it."""
        while True:
            try:
                await self._dial_and_serve()
            except Exception:
                log.exception("node.link_failed", url=self.url)
            await self._clock.sleep(self._backoff.next_delay_s())

    async def _dial_and_serve(self) -> None:
        try:
            link = await self._dial(self.url, self._hello)
        except MeshError as error:
            self._note_failure(error)
        else:
            await self._serve(link)

    # --- the life of one link -------------------------------------------------------------------

    async def _serve(self, link: OpenLink) -> None:
        self._adopt(link)
        failure: MeshError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(link))
                tasks.create_task(self._write(link))
                tasks.create_task(self._watch())
        except* MeshError as group:
            failure = _first(group)
        finally:
            if failure is None:
                await wait_first(self._clock, LAST_WORDS_S, self._send_last_words(link))
                failure = LinkClosed("gateway_stopped", "the gateway closed the link", url=self.url)
            self._abandon(link, failure)
            await link.close(1000, failure.code)

    async def _send_last_words(self, link: OpenLink) -> None:
        """The gateway stops: nodes are still told which sessions have ended."""
        for message in [message for message, _, _ in self._outbox if isinstance(message, Release | Cancel)]:
            await link.send(message)

    def _adopt(self, link: OpenLink) -> None:
        known_pid = self.info.pid if self.info else None
        self.info = link.peer_node or self.info
        if self.info is None or self.info.pid != known_pid:
            self.pace = Pace()
            self.stats = None
        self.connects += 1
        self.last_error = None
        self._link = link
        self._liveness.begin(self._clock.monotonic())
        self._backoff.reset()
        self._flush_unsent()
        self._beat(None)
        log.info("node.connected", url=self.url, **_described(self.info))
        self._on_change()

    def _flush_unsent(self) -> None:
        pid = self.info.pid if self.info else 0
        if pid == self._unsent.pid:
            for message in self._unsent.messages:
                self._put(message, None, None)
        self._unsent = _Unsent(pid)

    def _abandon(self, link: OpenLink, failure: MeshError) -> None:
        self._link = None
        self._writer_rests = False
        self.last_error = failure
        self.round_trip_s = None
        add_counters(self._past_counters, link.counters)
        for message, _, _ in self._outbox:
            if isinstance(message, Release | Cancel):
                self._unsent.messages.append(message)
        self._outbox.clear()
        closed = LinkClosed(failure.code, f"the link to {self.url} closed: {failure.message}", url=self.url)
        self._waits.fail_all(closed)
        for beat in self._beats.values():
            if beat.answered is not None and not beat.answered.done():
                beat.answered.set_exception(closed)
        self._beats.clear()
        log.warning("node.disconnected", url=self.url, code=failure.code, **_described(self.info))
        self._on_change()

    def _note_failure(self, error: MeshError) -> None:
        if self.last_error is None or self.last_error.code != error.code:
            log.warning("node.unreachable", url=self.url, code=error.code, reason=error.message)
        self.last_error = error

    # --- writing --------------------------------------------------------------------------------

    def _put(self, message: Message, tensors: Mapping[str, WireTensor] | None, wait: Wait | None) -> None:
        if self._link is None:
            raise LinkClosed("no_link", f"there is no link to {self.url}", url=self.url)
        if self._writer_rests and not self._outbox and self._sent_now(self._link, message, tensors):
            return
        self._outbox.append((message, tensors, wait))
        self._outbox_filled.set()

    def _sent_now(self, link: OpenLink, message: Message, tensors: Mapping[str, WireTensor] | None) -> bool:
        try:
            return link.send_now(message, tensors)
        except MeshError:
            return False  # the writer meets it again, and tells whoever waits

    async def _write(self, link: OpenLink) -> None:
        while True:
            self._writer_rests = True
            await self._outbox_filled.wait()
            self._writer_rests = False
            self._outbox_filled.clear()
            while self._outbox:
                if len(self._outbox) > OUTBOX_MESSAGES_MAX:
                    raise LinkClosed("outbox_full", f"{self.url} does not read", limit=OUTBOX_MESSAGES_MAX)
                message, tensors, wait = self._outbox[0]  # until it is sent: what ends a session must not be lost
                if wait is None:
                    await link.send(message)
                elif not wait.answer.done():
                    await self._send_step(link, message, tensors, wait)
                self._outbox.popleft()

    async def _send_step(
        self, link: OpenLink, message: Message, tensors: Mapping[str, WireTensor] | None, wait: Wait
    ) -> None:
        try:
            await link.send(message, tensors)
        except FrameError as error:
            wait.fail(error)

    # --- reading --------------------------------------------------------------------------------

    async def _read(self, link: OpenLink) -> None:
        while True:
            message, tensors = await link.receive()
            self._liveness.note_heard()
            if isinstance(message, StepResult):
                self._take_result(message, tensors)
            else:
                self._take_other(message)

    def _take_result(self, result: StepResult, tensors: dict[str, WireTensor]) -> None:
        self._liveness.note_progress()
        wait = self._waits.take_result(result, tensors)
        if wait is not None:
            took_s = self._clock.monotonic() - wait.asked_at - result.queue_us / 1e6
            self.pace.record(wait.step.new_len, max(took_s, result.compute_us / 1e6))
            self._liveness.note_arrived(wait.sent_mark)

    def _take_other(self, message: Message) -> None:
        match message:
            case CacheMiss():
                self._liveness.note_progress()
                wait = self._waits.take_miss(message)
                if wait is not None:
                    self._liveness.note_arrived(wait.sent_mark)
            case Error(session=None):
                log.warning("node.complained", url=self.url, code=message.code, reason=message.message)
            case Error():
                self._liveness.note_progress()
                self._waits.take_error(message)
            case Heartbeat(reply=True):
                self._take_heartbeat(message)
            case Heartbeat():
                self._put(Heartbeat(seq=message.seq, reply=True), None, None)
            case LoadProgress():
                self.load_progress = (message.done_bytes, message.total_bytes)
            case Loaded():
                self._take_info(message.node)
            case Drain():
                self._take_state("draining")
            case _:
                log.warning("message.ignored", url=self.url, kind=message.kind)

    def _take_heartbeat(self, reply: Heartbeat) -> None:
        beat = self._beats.pop(reply.seq, None)
        if beat is None:
            return
        self.round_trip_s = self._clock.monotonic() - beat.asked_at
        self._liveness.note_arrived(beat.sent_mark)
        if reply.stats is not None:
            if _has_worked(self.stats, reply.stats):
                self._liveness.note_progress()
            self.stats = reply.stats
            self._take_state(reply.stats.state)
        if beat.answered is not None and not beat.answered.done():
            beat.answered.set_result(None)

    def _take_state(self, state: NodeState) -> None:
        if self.info is not None and self.info.state != state:
            self._take_info(replace(self.info, state=state))

    def _take_info(self, info: NodeInfo) -> None:
        self.info = info
        if info.state != "loading":
            self.load_progress = None
        log.info("node.changed", url=self.url, **_described(info))
        self._on_change()

    # --- time -----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        ticks = 0
        while True:
            await self._clock.sleep(TICK_S)
            self._liveness.tick(self._clock.monotonic())
            self._check_silence()
            self._check_progress()
            ticks += 1
            if ticks % TICKS_PER_HEARTBEAT == 0:
                self._beat(None)

    def _beat(self, answered: asyncio.Future[None] | None) -> None:
        self._beat_seq += 1
        self._put(Heartbeat(seq=self._beat_seq), None, None)
        self._beats[self._beat_seq] = _Beat(self._clock.monotonic(), self._liveness.sent_bytes, answered)
        if len(self._beats) > HEARTBEATS_OPEN_MAX:
            raise LinkClosed("silent", f"{self.url} answers no heartbeat", limit=HEARTBEATS_OPEN_MAX)

    def _check_silence(self) -> None:
        silence_s = self._liveness.silence_s()
        if silence_s is not None:
            raise LinkClosed("silent", f"nothing came from {self.url} for {silence_s:.1f} s", silence_s=silence_s)

    def _check_progress(self) -> None:
        if not self._waits:
            return
        allowance_s = max(wait.allowance_s for wait in self._waits)
        if self.stats is not None and self.stats.queued_steps >= len(self._waits):
            # All our steps are queued, so what the node computes is somebody else's.
            allowance_s = max(allowance_s, self.pace.allowance_s(NEIGHBOUR_STEP_TOKENS))
        for wait in self._waits:
            if self._liveness.is_stalled(wait.asked_at_attentive, allowance_s):
                log.warning("step.stalled", url=self.url, session=wait.step.session, allowance_s=round(allowance_s, 2))
                wait.fail(DeadlineExceeded("step_stalled", f"{self.url} made no progress", url=self.url))


def _first(group: BaseExceptionGroup[MeshError]) -> MeshError:
    error = group.exceptions[0]
    assert isinstance(error, MeshError)  # noqa: S101 - the tasks of a link raise no groups of their own
    return error


def _has_worked(before: NodeStats | None, now: NodeStats) -> bool:
    return before is not None and (now.busy_us, sum(now.steps.values())) != (before.busy_us, sum(before.steps.values()))


def _described(info: NodeInfo | None) -> dict[str, object]:
    if info is None:
        return {}
    return {"node": info.node, "pid": info.pid, "layers": str(info.layers), "state": info.state}
