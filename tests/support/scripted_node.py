"""A node in memory that does what a test scripts: the other end of a `gateway.node_link.OpenLink`.

It computes `tests.support.fake_model`, where each token depends on every input that should be in each
hop's cache, and it is as strict as a real node about positions, epochs and duplicates. Frames are encoded
and decoded, so what arrives are views into frames. Time is the injected clock's.

    node = ScriptedNode("b", LayerRange(2, 4), num_layers=6, clock=clock)
    node.script = nth(5, Miss("evicted"))        # the sixth step it receives
    mesh = create_mesh([node.url], dial=create_dial([node]), ...)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from shared.clock import Clock
from shared.errors import CacheMissReason, DeadlineExceeded, HandshakeRefused, LinkClosed, StepFailed
from shared.frame import decode_frame
from shared.layers import LayerRange
from shared.link import HANDSHAKE_TIMEOUT_S
from shared.messages import (
    FEATURES,
    SAMPLING_FIELDS,
    CacheMiss,
    Cancel,
    Error,
    Fork,
    Heartbeat,
    Hello,
    Loaded,
    Message,
    NodeInfo,
    NodeState,
    NodeStats,
    Release,
    Step,
    StepResult,
    decode_header,
)
from shared.tensor_spec import WireTensor
from tests.support.fake_runner import ids_of
from tests.support.scripted_fate import (
    Again,
    Crash,
    Cut,
    Drop,
    Fail,
    Fate,
    Late,
    Mangle,
    Miss,
    Noise,
    Script,
    Slow,
    Stray,
    Twice,
    nth,
)
from tests.support.scripted_link import ScriptedLink
from tests.support.scripted_stage import VOCAB_SIZE, Held, Stage

MODEL = "scripted-model"

__all__ = [
    "MODEL",
    "VOCAB_SIZE",
    "Again",
    "Crash",
    "Cut",
    "Drop",
    "Fail",
    "Fate",
    "Late",
    "Mangle",
    "Miss",
    "Noise",
    "Script",
    "ScriptedLink",
    "ScriptedNode",
    "Slow",
    "Stray",
    "Twice",
    "create_dial",
    "ids_of",
    "nth",
]


@dataclass(eq=False)
class Queued:
    """A step that waits for its turn."""

    link: ScriptedLink
    step: Step
    tensors: dict[str, WireTensor]
    arrived_at: float
    is_cancelled: bool = False


@dataclass
class ScriptedNode:
    """One node; see the module's docstring.

    Args:
        node_id: Its id; its address follows from it unless `address` is given.
        layers: Its range.
        num_layers: Of the whole model.
        clock: Time.
        kv_cache: What it announces.
        caches: What it does; unlike `kv_cache` when it only answers `disabled`.
        text_tail: As an old tail: text instead of ids.
        token_ids: Whether it announces ids; by default the truth.
        streams: Hidden states of rank 4 instead of 3.
        needs_token_ids: Every step must carry token ids, whatever its range.
        step_s: What each step takes; steps are computed one after the other.
        sessions_max: And the following: what it announces.
        loses_fork: Whether a fork comes to nothing.
        faults: What it was asked that no gateway may ask.
    """

    node_id: str
    layers: LayerRange
    num_layers: int
    clock: Clock
    kv_cache: bool = True
    caches: bool = True
    text_tail: bool = False
    token_ids: bool | None = None
    streams: bool = False
    needs_token_ids: bool = False
    step_s: float = 0.0
    sessions_max: int = 8
    bytes_max: int = 0
    bytes_per_token: int = 10
    state: NodeState = "ready"
    context_len: int = 0
    sampling: tuple[str, ...] = SAMPLING_FIELDS
    features: tuple[str, ...] = FEATURES
    loses_fork: Callable[[Fork], bool] = lambda _fork: False
    faults: list[str] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    model: str = MODEL
    address: str = ""
    script: Script = lambda _step, _count: None
    pid: int = 1000
    reachable: bool = True
    stalled: bool = False
    refusal: HandshakeRefused | None = None
    sessions: dict[str, Held] = field(default_factory=dict)
    seen: list[Step] = field(default_factory=list)
    steps: Counter[str] = field(default_factory=Counter)
    applied: Counter[tuple[int, str, int, int]] = field(default_factory=Counter)
    ended: list[Message] = field(default_factory=list)
    dials: int = 0
    heartbeats: int = 0
    busy_us: int = 0
    queued_elsewhere: int = 0
    links: list[ScriptedLink] = field(default_factory=list)
    _backlog: list[tuple[ScriptedLink, Message, dict[str, WireTensor]]] = field(default_factory=list)
    _work: asyncio.Queue[Queued] = field(default_factory=asyncio.Queue)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _running: Queued | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.address or f"ws://{self.node_id}"

    @property
    def info(self) -> NodeInfo:
        """What it says of itself."""
        return NodeInfo(
            node=self.node_id,
            pid=self.pid,
            model=self.model,
            layers=self.layers,
            num_layers=self.num_layers,
            state=self.state,
            kv_cache=self.kv_cache,
            token_ids=not self.text_tail if self.token_ids is None else self.token_ids,
            kv_sessions_max=self.sessions_max,
            kv_bytes_max=self.bytes_max,
            kv_bytes_per_token=self.bytes_per_token,
            context_len=self.context_len,
            needs_token_ids=self.needs_token_ids,
            sampling=self.sampling,
            features=self.features,
        )

    @property
    def stage(self) -> Stage:
        """What it computes."""
        return Stage(self.layers, self.num_layers, self.text_tail, self.streams, self.needs_token_ids)

    # --- what tests do to it --------------------------------------------------------------------

    def cut(self) -> None:
        """Lose all links; the process goes on."""
        for link in self.links:
            link.cut()
        self.links.clear()

    def stop(self) -> None:
        """The process ends."""
        self.reachable = False
        self.pid += 1
        self.sessions.clear()
        if self._running is not None:
            self._running.is_cancelled = True
        while not self._work.empty():
            self._work.get_nowait()
        self.cut()

    def restart(self) -> None:
        """A new process takes its place at once."""
        self.stop()
        self.reachable = True

    def resume(self) -> None:
        """After `stalled`: read what has come meanwhile."""
        self.stalled = False
        backlog, self._backlog = self._backlog, []
        for link, message, tensors in backlog:
            self.take(link, message, tensors)

    def tell(self, message: Message) -> None:
        """Send something unasked."""
        for link in self.links:
            link.deliver(message)

    def become(self, info: NodeInfo) -> None:
        """Announce another description."""
        self.tell(Loaded(node=info))

    # --- what the gateway does to it ------------------------------------------------------------

    def connect(self) -> ScriptedLink:
        """Accept a link."""
        self.dials += 1
        if self.refusal is not None:
            raise self.refusal
        if not self.reachable:
            raise LinkClosed("unreachable", f"{self.url} does not answer")
        if not self._tasks:
            self._start(self._run())
        link = self._create_link()
        self.links.append(link)
        return link

    def _create_link(self) -> ScriptedLink:
        return ScriptedLink(self)

    def receive(self, link: ScriptedLink, data: bytes) -> None:
        """Read one frame."""
        frame = decode_frame(data)
        self.take(link, decode_header(frame.header), frame.tensors)

    def take(self, link: ScriptedLink, message: Message, tensors: dict[str, WireTensor]) -> None:
        """Act on one message, or keep it for later while stalled."""
        if self.stalled:
            self._backlog.append((link, message, tensors))
            return
        match message:
            case Step():
                self._work.put_nowait(Queued(link, message, tensors, self.clock.monotonic()))
            case Heartbeat(reply=False):
                self.heartbeats += 1
                link.deliver(Heartbeat(seq=message.seq, reply=True, stats=self._stats()))
            case Fork():
                self._fork(message)
            case Release() | Cancel():
                self.ended.append(message)
                self._cancel(message.session)
            case _:
                raise AssertionError(f"unexpected {message}")

    def _cancel(self, session: str) -> None:
        self.sessions.pop(session, None)
        for queued in [self._running, *self._work._queue]:  # type: ignore[attr-defined]
            if queued is not None and queued.step.session == session:
                queued.is_cancelled = True

    async def close(self) -> None:
        """End its tasks."""
        self.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- serving --------------------------------------------------------------------------------

    def _start(self, running: Awaitable[None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(running)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _stats(self) -> NodeStats:
        return NodeStats(
            state=self.state,
            sessions=len(self.sessions),
            kv_bytes=sum(held.length for held in self.sessions.values()) * self.bytes_per_token,
            queued_steps=self._work.qsize() + self.queued_elsewhere,
            steps=dict(self.steps),
            misses={},
            evictions={},
            errors={},
            busy_us=self.busy_us,
        )

    async def _run(self) -> None:
        while True:
            queued = self._running = await self._work.get()
            link, step = queued.link, queued.step
            started_at = self.clock.monotonic()
            fate = self.script(step, len(self.seen))
            self.seen.append(step)
            takes_s = fate.seconds if isinstance(fate, Slow) else self.step_s
            if takes_s:
                await self.clock.sleep(takes_s)
            if queued.is_cancelled:
                answer: tuple[Message, dict[str, WireTensor]] = _error(step, "cancelled")
            else:
                answer = self._meet(link, step, queued.tensors, fate)
            message = answer[0]
            if isinstance(message, StepResult):
                self.busy_us += round(takes_s * 1e6)
                queue_us = round((started_at - queued.arrived_at) * 1e6)
                message = replace(message, compute_us=round(takes_s * 1e6), queue_us=queue_us)
            self._send(queued, message, answer[1], fate)
            self._running = None

    def _send(self, queued: Queued, message: Message, tensors: dict[str, WireTensor], fate: Fate | None) -> None:
        link = queued.link
        match fate:
            case Late():
                self._start(self._deliver_late(link, message, tensors, fate.seconds))
            case Drop() | Cut() | Crash():
                pass
            case Noise():
                link.deliver_noise()
            case _:
                if isinstance(fate, Stray):
                    self._send_strays(link, message, tensors)
                link.deliver(message, tensors)
                if isinstance(fate, Twice):
                    self._start(self._deliver_late(link, message, tensors, fate.seconds))
                elif isinstance(fate, Again):
                    self._work.put_nowait(replace(queued))

    def _send_strays(self, link: ScriptedLink, message: Message, tensors: dict[str, WireTensor]) -> None:
        """What other steps, another epoch's and another session's could have been answered; nothing of it is true."""
        assert isinstance(message, StepResult | CacheMiss | Error)
        if isinstance(message, StepResult) and message.token_ids is not None:
            message = replace(message, token_ids=((message.token_ids[0] + 1) % VOCAB_SIZE,))
        tensors = {
            name: replace(tensor, data=memoryview(bytes(tensor.data.nbytes))) for name, tensor in tensors.items()
        }
        index, epoch = message.step_index or 0, message.epoch or 0
        asked = {(queued.step.session, queued.step.step_index) for queued in self._work._queue}  # type: ignore[attr-defined]
        if (message.session, index + 1) not in asked:  # a lie about what is waited for would be believed, and rightly
            link.deliver(replace(message, step_index=index + 1), tensors)
        if index:
            link.deliver(replace(message, step_index=index - 1, epoch=max(0, epoch - 1)), tensors)
        link.deliver(replace(message, session="nobody's"), tensors)

    def _meet(
        self, link: ScriptedLink, step: Step, tensors: dict[str, WireTensor], fate: Fate | None
    ) -> tuple[Message, dict[str, WireTensor]]:
        match fate:
            case Miss():
                self.sessions.pop(step.session, None)
                return _miss(step, fate.reason)
            case Fail():
                return _error(step, fate.code)
            case Drop() | Cut():
                answer = self._serve(step, tensors) if fate.applied else _error(step, "dropped")
                if isinstance(fate, Cut):
                    self.cut()
                return answer
            case Crash():
                self.stop()
                if fate.back_after_s is not None:
                    self._start(self._come_back(fate.back_after_s))
                return _error(step, "crashed")
            case Mangle():
                return fate.change(*self._serve(step, tensors))
            case _:
                return self._serve(step, tensors)

    async def _come_back(self, after_s: float) -> None:
        await self.clock.sleep(after_s)
        self.reachable = True

    async def _deliver_late(
        self, link: ScriptedLink, message: Message, tensors: dict[str, WireTensor], after_s: float
    ) -> None:
        await self.clock.sleep(after_s)
        link.deliver(message, tensors)

    def _serve(self, step: Step, tensors: dict[str, WireTensor]) -> tuple[Message, dict[str, WireTensor]]:
        held = self.sessions.get(step.session)
        reason = self._missing(step, held)
        if reason is not None:
            return _miss(step, reason)
        if held is not None and step.cache is not None:
            if step.epoch < held.epoch:
                return _error(step, "stale_epoch")
            if step.epoch == held.epoch and step.step_index <= held.step_index:
                return _error(step, "duplicate_step")
        return self._compute(step, tensors, held if step.cache == "decode" else None)

    def _missing(self, step: Step, held: Held | None) -> CacheMissReason | None:
        if step.layers != self.layers:
            return "range_mismatch"
        if step.model != self.model:
            return "model_mismatch"
        if step.cache != "decode":
            return None
        if not self.caches:
            return "disabled"
        if held is None:
            return "unknown"
        return "past_len_mismatch" if held.epoch <= step.epoch and held.length != step.past_len else None

    def _compute(
        self, step: Step, tensors: dict[str, WireTensor], base: Held | None
    ) -> tuple[Message, dict[str, WireTensor]]:
        try:
            held, (result, answers) = self.stage.compute(step, tensors, base)
        except StepFailed as error:
            self.faults.append(f"{error.message}: {step}")
            return _error(step, error.code)
        is_cached = step.cache is not None and self.caches
        if is_cached:
            self._hold(step.session, held)
            self.applied[self.pid, step.session, step.step_index, step.epoch] += 1
        self.steps[(step.cache or "stateless") if self.caches else "stateless"] += 1
        self._look_for_what_was_not_announced(step)
        return replace(result, cached=is_cached), answers

    def _look_for_what_was_not_announced(self, step: Step) -> None:
        asked = set(step.sampling.asked_fields()) if step.sampling else set()
        asked -= set(self.sampling)
        if step.score is not None and "score" not in self.features:
            asked.add("score")
        if step.pool is not None and "embed" not in self.features:
            asked.add("embed")
        if asked:
            self.faults.append(f"asked for {sorted(asked)}")
        if self.context_len and step.past_len + step.new_len > self.context_len:
            self.faults.append(f"asked for {step.past_len + step.new_len} positions")

    def _fork(self, fork: Fork) -> None:
        self.forks.append(fork)
        if "fork" not in self.features:
            self.faults.append("asked for a fork")
        held = self.sessions.get(fork.session)
        if held is None or self.loses_fork(fork) or not self.caches:
            return
        if (fork.layers, fork.model, fork.past_len) != (self.layers, self.model, held.length):
            return
        self._hold(fork.target, replace(held, epoch=fork.epoch, sampling=fork.sampling or held.sampling))

    def _hold(self, session: str, held: Held) -> None:
        self.sessions[session] = held


def create_dial(nodes: Sequence[ScriptedNode]) -> Callable[[str, Hello], Awaitable[ScriptedLink]]:
    """What `create_mesh` dials with, to reach these nodes by their addresses."""

    async def dial(url: str, _hello: Hello) -> ScriptedLink:
        node = next(node for node in nodes if node.url == url)
        await asyncio.sleep(0)
        if node.stalled:
            await node.clock.sleep(HANDSHAKE_TIMEOUT_S)
            raise DeadlineExceeded("handshake_timeout", f"{url} does not answer")
        return node.connect()

    return dial


def _miss(step: Step, reason: CacheMissReason) -> tuple[Message, dict[str, WireTensor]]:
    return CacheMiss(session=step.session, step_index=step.step_index, epoch=step.epoch, reason=reason), {}


def _error(step: Step, code: str) -> tuple[Message, dict[str, WireTensor]]:
    return Error(code=code, message=code, session=step.session, step_index=step.step_index, epoch=step.epoch), {}
