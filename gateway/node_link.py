"""One node as the gateway knows it: the link to it while there is one, and the steps that wait for its answers.

Theory of operation. How a link comes about is not decided here: `gateway.dialler` dials one again and again,
`gateway.joins` takes those that come. `serve` serves one link from its opening to its end. Three tasks do so:
one reads and hands each answer to whoever waits for it, one writes what `ask` and `post` have put into the
outbox, and one ticks. Neither `ask` nor `post` ever touches the socket.
Answers are matched by (session, step_index, epoch); one that nobody waits for (a late one) is dropped and
counted.

No wait has a timer of its own: the tick looks at all of them, four times a second, so a decoded token
costs no timer. `gateway.liveness` says when the link is to be closed for silence, which ends all waits
with `LinkClosed`, and which waits have met a stalled node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from gateway.bandwidth import Probing
from gateway.heartbeats import Beat, Heartbeats
from gateway.known_node import KnownNode
from gateway.liveness import TICK_S, Liveness
from gateway.open_link import OpenLink, add_counters
from gateway.outbox import Outbox
from gateway.stalls import fail_stalled
from gateway.waiting import first_error, raise_if_cancelled, wait_first
from gateway.waits import Answer, Wait, Waits
from shared.clock import Clock
from shared.errors import LinkClosed, MeshError
from shared.link import LinkCounters
from shared.messages import (
    CacheMiss,
    Cancel,
    Drain,
    Error,
    Fork,
    Heartbeat,
    Load,
    Loaded,
    LoadProgress,
    Message,
    Probe,
    Release,
    Step,
    StepResult,
    Unload,
    Unsupported,
)
from shared.tensor_spec import WireTensor

TICKS_PER_HEARTBEAT = 2
"""A heartbeat every 0.5 s."""
GATEWAY_STOPPED = "gateway_stopped"
LAST_WORDS_S = 1.0
"""How long a gateway that stops goes on telling a node which sessions have ended."""

log = structlog.stdlib.get_logger(__name__)


class NodeLink(KnownNode):
    """What is known of one node, and the way to it while a link is open.

    Args:
        url: Where the node listens; of one that has joined, where it came from.
        clock: Time.
        on_change: Called whenever the node's description or reachability has changed. Must not raise.
        joined: It dialled us.
    """

    def __init__(self, url: str, *, clock: Clock, on_change: Callable[[], None], joined: bool = False) -> None:
        super().__init__(url, on_change=on_change, joined=joined)
        self.connects = 0
        self.demand: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.granted: int | None = None
        self.lost_at: float | None = None
        self._clock = clock
        self._link: OpenLink | None = None
        self._ousted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        self._ended.set()
        self._waits = Waits()
        self._beats = Heartbeats()
        self._probing = Probing(clock)
        self._outbox = Outbox(url)
        self._past_counters = LinkCounters()
        self._liveness = Liveness()

    @property
    def is_open(self) -> bool:
        """Whether steps can be asked now."""
        return self._link is not None

    def away_s(self) -> float | None:
        """How long a node that was connected has been away; None while it is there, or has never been."""
        return None if self.lost_at is None else self._clock.monotonic() - self.lost_at

    @property
    def quiet_s(self) -> float:
        """How long nothing has come over the open link."""
        return self._liveness.quiet_s

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
            self._outbox.put(step, tensors, wait)
            return await answer
        finally:
            self._waits.remove(wait)
            if answer.cancelled():
                self._liveness.note_forsaken(allowance_s)

    def post(self, message: Release | Cancel | Fork) -> None:
        """Send without waiting. When the link is down, what ends a session is kept for the process to come back."""
        if self._link is not None:
            self._outbox.put(message)
        elif not isinstance(message, Fork):
            self._outbox.keep(message)

    def direct(self, message: Load | Unload | Drain) -> None:
        """Tell the node what to hold, or to leave. What it held is then no longer counted on.

        Raises:
            LinkClosed: There is no link.
        """
        self._outbox.put(message)
        if not isinstance(message, Drain):
            self.forget_range()

    async def measure(self) -> None:
        """Ask for a heartbeat and wait until `stats` and `round_trip_s` are current.

        Raises:
            LinkClosed: There is no link, or it closed meanwhile.
        """
        answered = asyncio.get_running_loop().create_future()
        self._beat(answered)
        await answered

    async def oust(self, reason: LinkClosed) -> None:
        """End the link that is open, if one is, and wait until its waits have been told."""
        if self._link is not None and not self._ousted.done():
            self._ousted.set_exception(reason)
        await self._ended.wait()

    async def serve(self, link: OpenLink) -> None:
        """Serve a link until it ends, for whatever reason; it is closed then.

        Raises:
            ValueError: Another link is being served.
        """
        if self._link is not None:
            raise ValueError(f"{self.name} has a link already")
        self._adopt(link)
        failure: MeshError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(link))
                tasks.create_task(self._outbox.write(link))
                tasks.create_task(self._watch())
                tasks.create_task(self._measure_bandwidth())
                await self._ousted
        except* MeshError as group:
            failure = first_error(group)
        finally:
            if failure is None:  # the gateway stops: nodes are still told which sessions have ended
                await wait_first(self._clock, LAST_WORDS_S, self._send_last_words(link))
                failure = LinkClosed(GATEWAY_STOPPED, "the gateway closed the link", url=self.url)
            self._abandon(link, failure)
            await link.close(1000, failure.code)
        raise_if_cancelled()

    async def _send_last_words(self, link: OpenLink) -> None:
        for message in self._outbox.last_words():
            await link.send(message)

    def _adopt(self, link: OpenLink) -> None:
        self.introduce(link)
        self.connects += 1
        self.last_error = self.lost_at = None
        self._link = link
        self._ousted = asyncio.get_running_loop().create_future()
        self._ended.clear()
        self._liveness.begin(self._clock.monotonic())
        self._outbox.open(link, self.pid)
        self._beat(None)
        log.info("node.connected", url=self.url, **self.described)
        self._on_change()

    def _abandon(self, link: OpenLink, failure: MeshError) -> None:
        self._link = None
        self.last_error, self.lost_at = failure, self._clock.monotonic()
        self.round_trip_s = None
        self.granted = None
        self.load_progress = None
        add_counters(self._past_counters, link.counters)
        self._outbox.close(self.pid)
        closed = LinkClosed(failure.code, f"the link to {self.url} closed: {failure.message}", url=self.url)
        self._waits.fail_all(closed)
        self._beats.fail_all(closed)
        note = log.info if self.drains or failure.code == GATEWAY_STOPPED else log.warning
        note("node.disconnected", url=self.url, code=failure.code, was_announced=self.drains, **self.described)
        self._ended.set()
        self._on_change()

    async def _read(self, link: OpenLink) -> None:
        while True:
            message, tensors = await link.receive()
            self._liveness.note_heard()
            if isinstance(message, StepResult):
                self._take_result(message, tensors)
            elif isinstance(message, Probe):
                self._take_probe(message, tensors)
            elif isinstance(message, Unsupported) and message.unsupported == Probe.kind:
                self._probing.fail()
            else:
                self._take_other(message)

    def _take_result(self, result: StepResult, tensors: dict[str, WireTensor]) -> None:
        self._liveness.note_progress()
        wait = self._waits.take_result(result, tensors)
        if wait is not None:
            self.note_step(wait, result, self._clock.monotonic())
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
                self._outbox.put(Heartbeat(seq=message.seq, reply=True))
            case LoadProgress():
                self.take_progress(message)
            case Loaded():
                self.take_loaded(message)
            case Drain():
                self.take_state("draining")
            case _:
                log.warning("message.ignored", url=self.url, kind=message.kind)

    def _take_probe(self, reply: Probe, tensors: dict[str, WireTensor]) -> None:
        mark = self._probing.take(reply, tensors) if reply.reply else None
        if mark is not None:
            self._liveness.note_arrived(mark)

    async def _measure_bandwidth(self) -> None:
        """Of a node that takes any range, since ranges are planned by it."""
        if self.machine is not None:
            self.bytes_per_s = await self._probing.run(self.url, self._send_probe, self._is_idle)

    def _is_idle(self) -> bool:
        return not self._waits and not self.demand()[0]

    def _send_probe(self, probe: Probe, tensors: Mapping[str, WireTensor]) -> int:
        mark = self._liveness.note_sent(sum(tensor.data.nbytes for tensor in tensors.values()))
        self._outbox.put(probe, tensors)
        return mark

    def _take_heartbeat(self, reply: Heartbeat) -> None:
        beat = self._beats.take(reply)
        if beat is None:
            return
        self.note_round_trip(self._clock.monotonic() - beat.asked_at)
        self._liveness.note_arrived(beat.sent_mark)
        self._take_grant(reply.granted)
        if reply.stats is not None and self.take_stats(reply.stats):
            self._liveness.note_progress()
        beat.end()

    def _take_grant(self, granted: int | None) -> None:
        """How many sessions we may have there: other gateways may have some too."""
        if granted != self.granted:
            self.granted = granted
            self._on_change()

    async def _watch(self) -> None:
        ticks = 0
        while True:
            await self._clock.sleep(TICK_S)
            self._liveness.tick(self._clock.monotonic())
            self._check_silence()
            fail_stalled(self._waits, self, self._liveness)
            ticks += 1
            if ticks % TICKS_PER_HEARTBEAT == 0:
                self._beat(None)

    def _beat(self, answered: asyncio.Future[None] | None) -> None:
        if self._link is None:
            raise LinkClosed("no_link", f"there is no link to {self.url}", url=self.url)
        beat = Beat(self._clock.monotonic(), self._liveness.sent_bytes, answered)
        sessions, waiting = self.demand()
        self._outbox.put(self._beats.ask(beat, name=self.url, sessions=sessions, waiting=waiting))

    def _check_silence(self) -> None:
        silence_s = self._liveness.silence_s()
        if silence_s is not None:
            raise LinkClosed("silent", f"nothing came from {self.url} for {silence_s:.1f} s", silence_s=silence_s)
