"""A scripted node with a real node's limits, on a network that delays, loses and cuts one way alone."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shared.errors import DeadlineExceeded, HandshakeRefused, LinkClosed
from shared.frame import decode_frame
from shared.layers import LayerRange
from shared.link import HANDSHAKE_TIMEOUT_S
from shared.messages import Error, Hello, Message, Step
from shared.tensor_spec import WireTensor
from tests.support.scripted_fate import Fate
from tests.support.scripted_link import ScriptedLink
from tests.support.scripted_node import ScriptedNode
from tests.support.scripted_stage import Held

KV_TTL_S = 600.0

Way = Literal["open", "lost", "held"]
"""What becomes of frames: they arrive, never arrive, or arrive once the way is open again."""
Answer = tuple[Message, dict[str, WireTensor]]


class NetworkLink(ScriptedLink):
    """Messages pass as they are: frames have tests of their own, and most of a run would be spent on them.

    Args:
        node: The other end.
        owner: The gateway at this end.
    """

    node: SimulatedNode

    def __init__(self, node: SimulatedNode, owner: str) -> None:
        super().__init__(node)
        self.owner = owner
        self._came: deque[tuple[Message, dict[str, WireTensor]] | None] = deque()
        self._comes = asyncio.Event()

    async def send(self, message: Message, tensors: Mapping[str, WireTensor] | None = None) -> None:
        """Hand a message to the network."""
        if self.is_closed:
            raise LinkClosed("link_closed", "the link is closed")
        self.node.send_there(self, message, dict(tensors or {}))

    async def receive(self) -> tuple[Message, dict[str, WireTensor]]:
        """The node's next message."""
        while not self._came:
            self._comes.clear()
            await self._comes.wait()
        item = self._came.popleft()
        if item is None:
            raise LinkClosed("connection_lost", "the node is gone")
        if isinstance(item[0], bytes):
            decode_frame(item[0])
        return item

    def cut(self) -> None:
        """Lose the connection."""
        self.is_closed = True
        self._arrive(None)

    def deliver(self, message: Message, tensors: Mapping[str, WireTensor] | None = None) -> None:
        """Let a message of the node set out."""
        self.node.send_back(self, message, dict(tensors or {}))

    def deliver_noise(self) -> None:
        """Let bytes arrive that are no frame."""
        self.arrive(b"no frame", {})  # type: ignore[arg-type]

    def arrive(self, message: Message, tensors: dict[str, WireTensor]) -> None:
        """Let a message arrive, unless nobody is there any more."""
        if not self.is_closed:
            self._arrive((message, tensors))

    def _arrive(self, item: tuple[Message, dict[str, WireTensor]] | None) -> None:
        self._came.append(item)
        self._comes.set()


@dataclass
class SimulatedNode(ScriptedNode):
    """Drops the least recently used sessions over its limits, and those that nobody used for long.

    Args:
        fates: What steps meet, by their number.
        fork_fails: The share of forks that come to nothing.
        on_step: Called at every step, before it is served.
        met: Counts fates that were met.
        loses_messages: A message has been lost on its way to here, so a session may be left until it expires.
        evicted: Sessions dropped for room.
    """

    fates: dict[int, Fate] = field(default_factory=dict)
    fork_fails: float = 0.0
    on_step: Callable[[], None] = lambda: None
    met: Counter[str] = field(default_factory=Counter)
    loses_messages: bool = False
    _owner: str = ""
    _has_left: bool = False
    evicted: int = 0
    there: Way = "open"
    back: Way = "open"
    _held_there: list[tuple[NetworkLink, Message, dict[str, WireTensor]]] = field(default_factory=list)
    _held_back: list[tuple[NetworkLink, Message, dict[str, WireTensor]]] = field(default_factory=list)
    _touched_at: dict[str, float] = field(default_factory=dict)
    _forks: int = 0

    def __post_init__(self) -> None:
        self.script = self._fate
        self.loses_fork = lambda _fork: self._loses_fork()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is computed, nothing is on its way, and it is as it was made."""
        tasks = len(self._tasks) <= 1 and self._running is None and self._work.empty()
        return tasks and self.there == self.back == "open" and not self.stalled and self.refusal is None

    # --- the network ------------------------------------------------------------------------------

    def connect_from(self, owner: str) -> NetworkLink:
        """Accept a link of this gateway."""
        self._owner = owner
        link = self.connect()
        assert isinstance(link, NetworkLink)
        return link

    def _create_link(self) -> ScriptedLink:
        return NetworkLink(self, self._owner)

    def cut_from(self, owner: str) -> None:
        """Lose the links of one gateway."""
        for link in [link for link in self.links if isinstance(link, NetworkLink) and link.owner == owner]:
            link.cut()
            self.links.remove(link)

    def send_there(self, link: NetworkLink, message: Message, tensors: dict[str, WireTensor]) -> None:
        """A message sets out to the node."""
        if self.there == "lost":
            self.loses_messages = True
        elif self.there == "held":
            self._held_there.append((link, message, tensors))
        else:
            self.take(link, message, tensors)

    def send_back(self, link: NetworkLink, message: Message, tensors: dict[str, WireTensor]) -> None:
        """A message sets out to the gateway."""
        if self.back == "open":
            link.arrive(message, tensors)
        elif self.back == "held":
            self._held_back.append((link, message, tensors))

    def open_there(self) -> None:
        """What was held arrives, and so does what comes."""
        self.there = "open"
        held, self._held_there = self._held_there, []
        for link, message, tensors in held:
            self.take(link, message, tensors)

    def open_back(self) -> None:
        """What was held arrives, and so does what comes."""
        self.back = "open"
        held, self._held_back = self._held_back, []
        for link, message, tensors in held:
            link.arrive(message, tensors)

    def stop(self) -> None:
        """The process ends, and with it what was on its way to it."""
        self._backlog.clear()
        self._held_there.clear()
        super().stop()

    def leaves(self) -> None:
        """The process ends for good."""
        self.stop()
        self._has_left = True

    def comes_back(self) -> None:
        """Another process takes its place, unless it left for good."""
        self.reachable = not self._has_left

    async def _come_back(self, after_s: float) -> None:
        await self.clock.sleep(after_s)
        self.comes_back()

    def hold(self, layers: LayerRange) -> None:
        """Other layers from now on; what it held of sessions is gone."""
        self.layers = layers
        self.sessions.clear()
        if self.back == "lost":
            self.cut()  # a link on which a message can be lost is no link
        else:
            self.become(self.info)

    # --- limits -----------------------------------------------------------------------------------

    def evict(self) -> None:
        """Drop every session, as a node does whose memory others need."""
        self.sessions.clear()

    def expire(self) -> None:
        """Drop sessions that nobody used for long."""
        for session in [s for s in self.sessions if self._is_expired(s)]:
            del self.sessions[session]

    def _is_expired(self, session: str) -> bool:
        return self.clock.monotonic() - self._touched_at[session] > KV_TTL_S

    def _serve(self, step: Step, tensors: dict[str, WireTensor]) -> Answer:
        self.on_step()
        self.expire()
        length = step.past_len + step.new_len
        if self.caches and step.cache and self.bytes_max and length * self.bytes_per_token > self.bytes_max:
            self.sessions.pop(step.session, None)
            self.met["budget_exceeded"] += 1
            code = "kv_budget_exceeded"
            return Error(
                code=code, message=code, session=step.session, step_index=step.step_index, epoch=step.epoch
            ), {}
        return super()._serve(step, tensors)

    def _hold(self, session: str, held: Held) -> None:
        super()._hold(session, held)
        self._touched_at[session] = self.clock.monotonic()
        others = sorted((at, other) for other, at in self._touched_at.items() if other in self.sessions)
        for _, other in others:
            if self._has_room():
                return
            if other != session:
                del self.sessions[other]
                self.evicted += 1

    def _has_room(self) -> bool:
        used_bytes = sum(held.length for held in self.sessions.values()) * self.bytes_per_token
        return len(self.sessions) <= self.sessions_max and (not self.bytes_max or used_bytes <= self.bytes_max)

    # --- fates ------------------------------------------------------------------------------------

    def _fate(self, _step: Step, count: int) -> Fate | None:
        fate = self.fates.get(count)
        if fate is not None:
            self.met[name_of(fate)] += 1
        return fate

    def _loses_fork(self) -> bool:
        self._forks += 1
        lost = self._forks * self.fork_fails % 1 + self.fork_fails >= 1
        self.met["lost_fork"] += lost
        return lost


def name_of(fate: Fate) -> str:
    """What a fate is counted as."""
    detail = getattr(fate, "reason", None) or getattr(fate, "code", None) or getattr(fate, "change", None)
    name = type(fate).__name__.lower()
    return name if detail is None else f"{name} {getattr(detail, '__name__', detail)}"


async def dial(node: SimulatedNode, owner: str, _hello: Hello) -> NetworkLink:
    """Reach a node through the network as it is now.

    Raises:
        LinkClosed: Nobody is there.
        DeadlineExceeded: It does not answer.
        HandshakeRefused: It will not have us.
    """
    await asyncio.sleep(0)
    if node.reachable and (node.stalled or node.there != "open" or node.back != "open"):
        await node.clock.sleep(HANDSHAKE_TIMEOUT_S)
        raise DeadlineExceeded("handshake_timeout", f"{node.url} does not answer")
    return node.connect_from(owner)


REFUSAL = HandshakeRefused("not_now", "the node will not have this gateway now")
