"""Plays one schedule: nodes, a gateway's core, its callers, and what happens to them, on one virtual clock.

What must hold is checked while it runs (`World.watch`, at every step that reaches a node) and after it (`World.judge`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from gateway.admission import Admission
from gateway.fleet.cover import covers
from gateway.fleet.live import Fleet
from gateway.generation import Generator
from gateway.joins import Joins
from gateway.mesh import Mesh
from gateway.recovery import RECOVERIES_PER_PASS_MAX
from shared.errors import MeshError
from shared.layers import LayerRange
from shared.messages import Drain, Hello
from tests.simulation.caller import make
from tests.simulation.joiner import (
    JoinedNetworkLink,
    SimulatedJoiner,
    create_fleet,
    create_joins,
    ended,
    has_link,
    machine,
)
from tests.simulation.node import KV_TTL_S, REFUSAL, NetworkLink, SimulatedNode, dial
from tests.simulation.schedule import Call, Event, Schedule, is_joiner, room_of
from tests.support.memory_mesh import NUM_LAYERS, EventClock, create_gateway

RUN_MAX_S = 900.0
"""Virtual seconds after which something hangs: far beyond all limits of a schedule together."""
LOOK_EVERY_S = 0.25
BACK_WITHIN_S = 60.0
"""A node that is there again is found within the longest back-off and one handshake that timed out; and a plan is made
within its grace, and loaded."""
FAILURES = frozenset(
    {
        "node_lost",
        "no_progress",
        "no_route",
        "queue_full",
        "queue_timeout",
        "session_too_large",
        "step_stalled",
        "internal_error",
        "out_of_memory",
        "kv_budget_exceeded",
        "non_finite_logits",
        "bad_answer",
    }
)
"""What a request may end with when limits are short and nodes keep failing."""


@dataclass
class Gateway:
    """One gateway's core, running."""

    name: str
    mesh: Mesh
    generator: Generator
    joins: Joins
    fleet: Fleet | None
    running: set[asyncio.Task[None]]
    callers: list[asyncio.Task[None]] = field(default_factory=list)

    async def serve(self, link: JoinedNetworkLink, host: str) -> None:
        """Serve a node that has dialled, for as long as this gateway runs."""
        serving = asyncio.create_task(self.joins.serve(link, host))
        self.running.add(serving)
        try:
            await asyncio.wait({serving})
        finally:
            self.running.discard(serving)
            link.cut()
        if not serving.cancelled() and (error := serving.exception()) is not None:
            raise error


@dataclass
class World:
    """One simulation. `play` runs it once.

    Args:
        schedule: What happens.
        clock: Virtual time.
        tally: Counts what has happened.
        met: Counts what steps and forks have met.
        ends: How each call ended, by its number.
        given: Sessions that gave way, and the nodes on which they did.
    """

    schedule: Schedule
    clock: EventClock = field(default_factory=EventClock)
    tally: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    ends: dict[int, str] = field(default_factory=dict)
    given: set[tuple[str, str]] = field(default_factory=set)
    nodes: list[SimulatedNode] = field(default_factory=list)
    gateways: list[Gateway] = field(default_factory=list)

    _violation: AssertionError | None = None

    def __post_init__(self) -> None:
        self.began_at = self.clock.monotonic()

    async def play(self) -> None:
        """Let everything happen, and check what must hold.

        Raises:
            AssertionError: Something does not.
        """
        self.nodes = [self._create_node(index) for index in range(len(self.schedule.cuts))]
        self.gateways.append(self._start_gateway("g0"))
        joiners = [node for node in self.nodes if isinstance(node, SimulatedJoiner)]
        joining = {asyncio.create_task(self._keep_joining(node)) for node in joiners}
        work = [
            *(self._let_join(node) for node in range(len(self.nodes))),
            *(self._let_happen(event) for event in self.schedule.events),
            *(self._let_call(number, call) for number, call in enumerate(self.schedule.calls)),
        ]
        async with asyncio.TaskGroup() as tasks:
            for part in work:
                tasks.create_task(part)
        await self._settle()
        await ended(joining)
        for gateway in self.gateways:
            await self._stop_gateway(gateway)
        await self.judge()

    def on_idle(self) -> None:
        """Nothing can run: time moves."""
        if self._violation is not None:
            raise self._violation
        self.clock.wake_next()
        assert self.clock.monotonic() < self.began_at + RUN_MAX_S, f"something hangs: {self._state()}"

    def _state(self) -> str:
        running = sorted(set(range(len(self.schedule.calls))) - set(self.ends))
        return f"calls without an end: {running}; busy nodes: {[n.node_id for n in self.nodes if not n.is_quiet]}"

    # --- making it --------------------------------------------------------------------------------

    def _create_node(self, index: int) -> SimulatedNode:
        schedule, cut = self.schedule, self.schedule.cuts[index]
        options = schedule.node_options[index]
        if is_joiner(cut):
            kind, layers = partial(SimulatedJoiner, machine=machine(room_of(cut), 1.0 + index)), "0:6"
        else:
            kind, layers = SimulatedNode, cut
        return kind(
            "abcdefgh"[index],
            LayerRange.parse(layers),
            NUM_LAYERS,
            self.clock,
            fates={fate.step: fate.fate for fate in schedule.fates if fate.node == index},
            on_step=self._watch_safely,
            met=self.met,
            reachable=not schedule.joins_at_s[index],
            **options,
        )

    def _start_gateway(self, name: str) -> Gateway:
        dialled = [node for node in self.nodes if not isinstance(node, SimulatedJoiner)]
        by_url = {node.url: node for node in dialled}

        async def reach(url: str, hello: Hello) -> NetworkLink:
            return await dial(by_url[url], name, hello)

        mesh, generator = create_gateway(self.clock, dialled, gateway_id=name, dial=reach, **self.schedule.settings)
        self._note_what_is_given(generator.admission)
        joins, fleet = create_joins(mesh, name, self.clock), None
        runs = [mesh.run()]
        if len(dialled) < len(self.nodes):
            fleet = create_fleet(mesh, generator, self.clock)
            runs += [joins.run(), fleet.run()]
        return Gateway(name, mesh, generator, joins, fleet, {asyncio.create_task(run) for run in runs})

    def _note_what_is_given(self, admission: Admission) -> None:
        give_back = admission.give_back

        def note(session: str, node: str) -> None:
            self.given.add((session, node))
            self.tally["places given"] += 1
            give_back(session, node)

        admission.give_back = note  # type: ignore[method-assign]

    async def _stop_gateway(self, gateway: Gateway) -> None:
        for caller in gateway.callers:
            caller.cancel()
        await asyncio.gather(*gateway.callers, return_exceptions=True)
        await ended(gateway.running)

    # --- what happens -----------------------------------------------------------------------------

    async def _let_join(self, index: int) -> None:
        at_s = self.schedule.joins_at_s[index]
        if at_s:
            await self.clock.sleep(at_s)
            self.nodes[index].comes_back()
            self.tally["joined late"] += 1

    async def _keep_joining(self, node: SimulatedJoiner) -> None:
        try:
            await node.keep_joining(lambda: (self.gateways[-1].name, self.gateways[-1].serve))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            self._violation = self._violation or AssertionError(f"a joined node met {error!r}")

    async def _let_call(self, number: int, call: Call) -> None:
        await self.clock.sleep(call.at_s)
        gateway = self.gateways[-1]
        caller = asyncio.create_task(self._call(number, call, gateway))
        gateway.callers.append(caller)
        if call.leave_at_s is not None:
            await self.clock.sleep(call.leave_at_s - call.at_s)
            caller.cancel()
        await asyncio.wait([caller])
        if caller.cancelled():
            self._end(number, "cut off" if gateway is not self.gateways[-1] else "left")
        else:
            caller.result()

    async def _call(self, number: int, call: Call, gateway: Gateway) -> None:
        try:
            end = await make(call, gateway.generator, self.clock)
        except MeshError as error:
            end = error.code
        self._end(number, end)

    def _end(self, number: int, end: str) -> None:
        assert number not in self.ends, f"call {number} ended twice: {self.ends[number]} and {end}"
        self.ends[number] = end
        self.tally[f"end {end}"] += 1

    async def _let_happen(self, event: Event) -> None:
        await self.clock.sleep(event.at_s)
        self.tally[f"event {event.kind}"] += 1
        happen: Callable[[Event, SimulatedNode], Awaitable[None]] = getattr(self, event.kind)
        await happen(event, self.nodes[event.node])

    async def stall(self, event: Event, node: SimulatedNode) -> None:
        """The process is stopped and goes on later."""
        node.stalled = True
        await self.clock.sleep(event.seconds)
        node.resume()

    async def kill(self, event: Event, node: SimulatedNode) -> None:
        """The process ends; another takes its place later."""
        node.stop()
        await self.clock.sleep(event.seconds)
        node.comes_back()

    async def leave(self, _event: Event, node: SimulatedNode) -> None:
        """The node is gone for good."""
        node.leaves()

    async def cut(self, _event: Event, node: SimulatedNode) -> None:
        """The connection is lost."""
        node.cut()

    async def deafen(self, event: Event, node: SimulatedNode) -> None:
        """Nothing reaches the node, which goes on talking."""
        node.there = "lost"
        await self.clock.sleep(event.seconds)
        node.open_there()

    async def mute(self, event: Event, node: SimulatedNode) -> None:
        """Nothing comes from the node, which goes on listening."""
        node.back = "lost"
        await self.clock.sleep(event.seconds)
        node.open_back()

    async def delay_there(self, event: Event, node: SimulatedNode) -> None:
        """What is sent to the node arrives late, all at once."""
        node.there = "held"
        await self.clock.sleep(event.seconds)
        node.open_there()

    async def delay_back(self, event: Event, node: SimulatedNode) -> None:
        """What the node sends arrives late, all at once."""
        node.back = "held"
        await self.clock.sleep(event.seconds)
        node.open_back()

    async def evict(self, _event: Event, node: SimulatedNode) -> None:
        """The node drops its sessions."""
        node.evict()

    async def drain(self, event: Event, node: SimulatedNode) -> None:
        """The node wants no more sessions, and changes its mind; one that has joined ends, and joins again."""
        if isinstance(node, SimulatedJoiner):
            node.drain()
            await self.clock.sleep(event.seconds)
            node.stop()
            node.comes_back()
            return
        node.state = "draining"
        node.tell(Drain())
        await self.clock.sleep(event.seconds)
        node.state = "ready"

    async def refuse(self, event: Event, node: SimulatedNode) -> None:
        """The connection is lost, and the node takes no other for a while."""
        node.refusal = REFUSAL
        node.cut()
        await self.clock.sleep(event.seconds)
        node.refusal = None

    async def other_work(self, event: Event, node: SimulatedNode) -> None:
        """Other gateways' steps wait at the node, and each of ours takes longer."""
        node.queued_elsewhere, node.step_s = 5, node.step_s + 0.5
        await self.clock.sleep(event.seconds)
        node.queued_elsewhere, node.step_s = 0, node.step_s - 0.5

    async def recut(self, _event: Event, node: SimulatedNode) -> None:
        """The node has been given the whole model instead of its range."""
        node.hold(LayerRange(0, NUM_LAYERS))

    async def restart_gateway(self, _event: Event, _node: SimulatedNode) -> None:
        """The gateway stops in order; another takes its place."""
        gateway = self.gateways[-1]
        self.gateways.append(self._start_gateway(f"g{len(self.gateways)}"))
        await self._stop_gateway(gateway)

    async def kill_gateway(self, event: Event, node: SimulatedNode) -> None:
        """The gateway ends at once, so that no node hears of it; another takes its place."""
        for each in self.nodes:
            each.cut_from(self.gateways[-1].name)
            each.loses_messages = True
        await self.restart_gateway(event, node)

    # --- what must hold ---------------------------------------------------------------------------

    def _watch_safely(self) -> None:
        """A node's task must not end of what the gateway did wrong."""
        try:
            self.watch()
        except AssertionError as error:
            self._violation = self._violation or error

    def watch(self) -> None:
        """At every step: no budget is exceeded, and every session has its places where its hops are."""
        for gateway in self.gateways:
            journal, reserved = gateway.generator.journal, gateway.generator.admission._reserved
            assert journal.nbytes <= journal.bytes_max, f"the journal holds {journal.nbytes} bytes"
            for node in self.nodes:
                places = reserved.get(node.node_id, {})
                if not node.kv_cache:
                    continue
                assert len(places) <= node.sessions_max, f"{node.node_id} is promised to {sorted(places)}"
                promised = sum(places.values())
                assert not node.bytes_max or promised <= node.bytes_max, f"{promised} bytes of {node.node_id}"
            for session, generation in gateway.generator.lifecycle.running.items():
                has = {node for node, places in reserved.items() if session in places}
                needs = {hop.node for hop in generation.session.hops}
                gave = {node for node in needs - has if (session, node) in self.given}
                assert has == needs - gave, f"{session} is at {sorted(needs)} and has places at {sorted(has)}"

    async def _settle(self) -> None:
        """Wait until nothing more comes of what has happened."""
        while not all(node.is_quiet for node in self.nodes):
            await self.clock.sleep(LOOK_EVERY_S)
        limit_s = self.clock.monotonic() + BACK_WITHIN_S
        while not self._is_whole():
            assert self.clock.monotonic() < limit_s, f"not found again: {self._links()}"
            await self.clock.sleep(LOOK_EVERY_S)
        await self.clock.sleep(LOOK_EVERY_S)

    def _links(self) -> list[str]:
        mesh = self.gateways[-1].mesh
        links = [f"{n.node_id} there: {n.reachable}, link open: {has_link(mesh, n)}" for n in self.nodes]
        return [*links, *mesh.idle()]

    def _is_whole(self) -> bool:
        gateway = self.gateways[-1]
        found = all(has_link(gateway.mesh, node) == node.reachable for node in self.nodes)
        return found and (self.schedule.is_harsh or gateway.fleet is None or self._is_covered(gateway.mesh))

    def _is_covered(self, mesh: Mesh) -> bool:
        ready = [info.layers for info in mesh.nodes() if info.state == "ready"]
        return covers(ready, NUM_LAYERS)

    async def judge(self) -> None:
        """After it: every call has ended in one way, and nothing is left anywhere."""
        self.tally.update(self.met)
        if self._violation is not None:
            raise self._violation
        self._judge_ends()
        for gateway in self.gateways:
            self._judge_gateway(gateway)
        lost = any(node.loses_messages for node in self.nodes) or len(self.gateways) > 1
        for node in self.nodes:
            self._judge_node(node, is_exact=not lost)
        if lost:
            self.clock.jump(KV_TTL_S + 1)
        for node in self.nodes:
            node.expire()
            assert node.sessions == {}, f"{node.node_id} still holds {sorted(node.sessions)}"
            await node.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"still running: {left}"

    def _judge_ends(self) -> None:
        assert sorted(self.ends) == list(range(len(self.schedule.calls))), "a call has no end"
        allowed = {"complete", "left", "cut off"}
        if self.schedule.is_harsh:
            allowed |= FAILURES
        if self.met.total() > RECOVERIES_PER_PASS_MAX:
            allowed |= {"no_progress", "step_stalled"}  # all that steps met may have been in one pass
        assert set(self.ends.values()) <= allowed, f"ends: {self.ends}"

    def _judge_gateway(self, gateway: Gateway) -> None:
        generator = gateway.generator
        totals, outcomes = generator.totals, generator.totals.outcomes
        assert outcomes["started"] == outcomes["completed"] + outcomes["cancelled"] + outcomes["failed"], outcomes
        assert generator.lifecycle.running == {}
        assert (generator.admission.active, generator.admission.queued) == (0, 0)
        assert generator.admission._reserved == {}, "places are left"
        assert generator.journal.nbytes == 0, "the journal still holds bytes"
        assert generator.journal._open == {}, "journals are left open"
        assert generator.journal._sharers == {}, "pieces are left shared"
        assert all(link.waiting == 0 for link in gateway.mesh.links), "waits are left"
        late = sum(link.late_answers for link in gateway.mesh.links)
        for name in ("replays", "full_replays", "moves", "misses", "reroutes"):
            self.tally[f"gateway {name}"] += getattr(totals, name)
        if gateway.fleet is not None and gateway.fleet.target is not None:
            self.tally["planned"] += 1
            self.tally["planned anew"] += gateway.fleet.target.reason != "the first plan"
        self.tally["gateway late answers"] += late
        self.tally["gateway journal drops"] += generator.journal.drops

    def _judge_node(self, node: SimulatedNode, *, is_exact: bool) -> None:
        assert node.faults == [], f"{node.node_id} was asked what no gateway may ask: {node.faults}"
        twice = [key for key, times in node.applied.items() if times > 1]
        assert not twice, f"{node.node_id} applied {twice} more than once"
        if is_exact:
            assert node.sessions == {}, f"{node.node_id} still holds {sorted(node.sessions)}"
            assert not node.evicted, f"{node.node_id} was given more sessions than it has room for"
        self.tally["evicted for room"] += node.evicted


def summary(tallies: Sequence[Counter[str]]) -> Counter[str]:
    """All of them together, and how many schedules there were of each kind."""
    total: Counter[str] = Counter()
    for tally in tallies:
        total.update(tally)
    total["schedules"] = len(tallies)
    total["schedules with a replay"] = sum(tally["gateway replays"] > 0 for tally in tallies)
    return total
