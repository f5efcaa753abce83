"""One node's link: answers, late answers, silence, stalls, reconnecting, heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.heartbeats import HEARTBEATS_OPEN_MAX
from gateway.liveness import SILENCE_MAX_S, STEP_WAIT_MAX_S, TICK_S
from gateway.node_link import NodeLink
from gateway.outbox import OUTBOX_MESSAGES_MAX, UNSENT_MAX
from gateway.pacing import ALLOWANCE_FLOOR_S, UNKNOWN_ALLOWANCE_S, Pace
from gateway.waits import Answer
from shared.errors import CacheMissed, DeadlineExceeded, FrameError, HandshakeRefused, LinkClosed, StepFailed
from shared.layers import LayerRange
from shared.messages import (
    Cancel,
    Drain,
    Error,
    Fork,
    Heartbeat,
    LoadProgress,
    Release,
    Step,
    StepResult,
    Unsupported,
)
from shared.tensor_spec import WireTensor
from tests.support.fake_runner import write_ids
from tests.support.memory_mesh import ScriptedMesh, create_node, idle, scripted_mesh
from tests.support.scripted_node import MODEL, Cut, Drop, Fail, Late, Miss, ScriptedNode, Slow, nth


@pytest.fixture
async def mesh() -> AsyncIterator[ScriptedMesh]:
    """A mesh of one node that holds the whole model."""
    async with scripted_mesh(["0:6"]) as scripted:
        yield scripted


@pytest.fixture
def node(mesh: ScriptedMesh) -> ScriptedNode:
    """The node."""
    return mesh.nodes[0]


@pytest.fixture
def link(mesh: ScriptedMesh) -> NodeLink:
    """The gateway's link to it."""
    return mesh.mesh.links[0]


def step(index: int = 0, *, epoch: int = 0, session: str = "s", new_len: int = 1) -> Step:
    """A prefill that asks for no output."""
    return Step(
        session=session,
        step_index=index,
        epoch=epoch,
        cache="prefill",
        new_len=new_len,
        layers=LayerRange(0, 6),
        model=MODEL,
        output_len=0,
    )


def ask(link: NodeLink, asked: Step | None = None, *, patience: float = 1.0) -> asyncio.Task[Answer]:
    """Ask a step in a task."""
    asked = asked or step()
    return asyncio.create_task(link.ask(asked, {"token_ids": write_ids([7] * asked.new_len)}, patience=patience))


async def test_an_answer_reaches_who_asked(mesh: ScriptedMesh, link: NodeLink) -> None:
    """Two sessions ask at once and get their own answers."""
    answers = await mesh.drive(asyncio.gather(ask(link, step(session="s1")), ask(link, step(session="s2"))))
    assert [result.session for result, _ in answers] == ["s1", "s2"]
    assert link.waiting == 0


async def test_misses_and_errors_are_raised(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """Typed, with the node's own reason or code."""
    node.script = nth(0, Miss("expired"), Fail("out_of_memory"))
    with pytest.raises(CacheMissed) as miss:
        await mesh.drive(ask(link))
    assert miss.value.reason == "expired"
    with pytest.raises(StepFailed) as failure:
        await mesh.drive(ask(link, step(1)))
    assert failure.value.code == "out_of_memory"


async def test_an_error_that_names_only_the_session_ends_its_wait(
    mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink
) -> None:
    """A node that could not read the step cannot repeat its number."""
    node.script = nth(0, Drop())
    asked = ask(link)
    await idle()
    node.tell(Error(code="bad_step", session="s"))
    with pytest.raises(StepFailed, match="bad_step"):
        await mesh.drive(asked)


async def test_late_answers_are_dropped_and_counted(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """Of an older epoch, of a step nobody waits for, or of one that was answered already."""
    node.script = nth(0, Drop())
    asked = ask(link, step(3, epoch=2))
    await idle()
    node.tell(StepResult(session="s", step_index=3, epoch=1))
    node.tell(StepResult(session="other", step_index=3, epoch=2))
    node.tell(Error(code="x", session="other", step_index=3, epoch=2))
    await idle()
    assert not asked.done()
    assert link.late_answers == 3
    node.tell(StepResult(session="s", step_index=3, epoch=2))
    node.tell(StepResult(session="s", step_index=3, epoch=2))
    await mesh.drive(asked)
    assert link.late_answers == 4


async def test_a_cancelled_caller_waits_for_nothing(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """Its answer is late when it comes."""
    node.script = nth(0, Late(1.0))
    asked = ask(link)
    await idle()
    asked.cancel()
    await idle()
    assert link.waiting == 0
    await mesh.drive(mesh.clock.sleep(1.5))
    assert link.late_answers == 1


async def test_a_step_cancelled_before_it_leaves_is_not_sent(node: ScriptedNode, link: NodeLink) -> None:
    """Nothing is computed for a caller who left."""
    asked = ask(link)
    await asyncio.sleep(0)
    asked.cancel()
    await idle()
    assert node.seen == []


async def test_the_same_step_is_not_asked_twice(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """Answers could not be told apart: a fault of the caller."""
    node.script = nth(0, Drop())
    first = ask(link)
    await idle()
    with pytest.raises(ValueError, match="already waited for"):
        await ask(link)
    first.cancel()
    await idle()


async def test_a_step_over_the_limits_fails_alone(mesh: ScriptedMesh, link: NodeLink) -> None:
    """The link stays, and so do other sessions."""
    huge = WireTensor("u8", (2**29,), memoryview(bytearray(2**29)))
    with pytest.raises(FrameError):
        await mesh.drive(link.ask(step(), {"token_ids": huge}))
    assert link.is_open
    await mesh.drive(ask(link, step(1)))


async def test_losing_the_link_ends_every_wait_at_once(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """No deadline has to pass."""
    node.script = nth(0, Drop(), Cut())
    waits = [ask(link, step(session="s1")), ask(link, step(session="s2"))]
    before_s = mesh.clock.monotonic()
    for wait in waits:
        with pytest.raises(LinkClosed):
            await mesh.drive(wait)
    assert mesh.clock.monotonic() == before_s
    with pytest.raises(LinkClosed):
        await ask(link, step(1))


async def test_a_silent_node_is_given_up_within_seconds(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """As after SIGSTOP: no answer, no heartbeat, but the socket stays open."""
    await mesh.drive(ask(link))
    node.stalled = True
    asked = ask(link, step(1))
    started_s = mesh.clock.monotonic()
    with pytest.raises(LinkClosed, match="nothing came"):
        await mesh.drive(asked)
    assert mesh.clock.monotonic() - started_s <= SILENCE_MAX_S + TICK_S
    assert link.last_error is not None
    assert link.last_error.code == "silent"


async def test_frames_on_their_way_extend_the_silence(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """A long prefill over a slow link keeps heartbeats waiting behind it; the node is not dead."""
    node.stalled = True
    payload = WireTensor("u8", (4_000_000,), memoryview(bytes(4_000_000)))
    asked = asyncio.create_task(link.ask(step(), {"token_ids": payload}))
    await mesh.drive(mesh.clock.sleep(SILENCE_MAX_S + 3.5))
    assert link.waiting == 1
    await mesh.drive(mesh.clock.sleep(1.0))
    with pytest.raises(LinkClosed):
        await asked


async def test_our_own_pause_is_not_the_nodes_silence(mesh: ScriptedMesh, link: NodeLink) -> None:
    """A laptop that was asleep finds its links where it left them."""
    await mesh.drive(ask(link))
    mesh.clock.jump(3600.0)
    await mesh.drive(ask(link, step(1)))
    await mesh.drive(mesh.clock.sleep(5.0))
    assert link.connects == 1


async def test_a_stalled_step_is_given_up_while_heartbeats_go_on(
    mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink
) -> None:
    """Two seconds and a few times what such a step usually takes."""
    node.script = lambda _step, count: Drop() if count else Slow(0.1)
    await mesh.drive(ask(link))
    started_s = mesh.clock.monotonic()
    with pytest.raises(DeadlineExceeded):
        await mesh.drive(ask(link, step(1)))
    assert ALLOWANCE_FLOOR_S < mesh.clock.monotonic() - started_s < ALLOWANCE_FLOOR_S + 0.4 + 3 * TICK_S
    assert link.is_open


async def test_patience_multiplies_the_deadline(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """After one missed deadline the next is longer: the node may only have become slower."""
    node.script = lambda _step, count: Drop() if count else None
    await mesh.drive(ask(link))
    started_s = mesh.clock.monotonic()
    with pytest.raises(DeadlineExceeded):
        await mesh.drive(ask(link, step(1), patience=4.0))
    assert mesh.clock.monotonic() - started_s > 4 * ALLOWANCE_FLOOR_S


async def test_a_first_step_has_more_time(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """Nothing is known of a process that has not answered yet."""
    node.script = nth(0, Slow(UNKNOWN_ALLOWANCE_S - 5))
    await mesh.drive(ask(link))


async def test_waiting_behind_other_sessions_is_no_stall(
    mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink
) -> None:
    """Twenty steps of a second each are served one after the other; the last one waits for nineteen."""
    node.script = nth(0, Slow(0.01))
    await mesh.drive(ask(link))
    node.script = lambda _step, _count: Slow(1.0)
    answers = await mesh.drive(asyncio.gather(*(ask(link, step(session=f"s{n}")) for n in range(20))))
    assert len(answers) == 20
    assert link.pace.decode_s is not None
    assert link.pace.decode_s < 1.1, "time in the node's queue is not counted as the step's duration"


async def test_waiting_behind_another_gateways_steps_is_no_stall(
    mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink
) -> None:
    """Heartbeats say that the node works, so it is alive."""
    node.script = lambda _step, count: Late(20.0) if count else Slow(0.01)
    await mesh.drive(ask(link))
    asked = ask(link, step(1))
    for _ in range(19):
        await mesh.drive(mesh.clock.sleep(1.0))
        node.busy_us += 1_000_000
    await mesh.drive(asked)


async def test_one_long_step_of_another_gateway_is_no_stall(
    mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink
) -> None:
    """A node with work queued that we did not send may be in the middle of a long prefill."""
    link.pace = Pace(decode_s=0.01, prefill_s_per_token=0.01, prefill_s=2.56)
    node.queued_elsewhere = 1
    node.script = nth(0, Late(6.0))
    await mesh.drive(ask(link))
    node.queued_elsewhere = 0


async def test_a_step_that_was_given_up_still_occupies_the_node(
    mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink
) -> None:
    """A caller's long step that nobody waits for any more must not make the next one look stalled."""
    link.pace = Pace(decode_s=0.01, prefill_s_per_token=1.0, prefill_s=10.0)
    node.script = nth(0, Slow(10.0))
    given_up = ask(link, step(new_len=10))
    await idle()
    given_up.cancel()
    await mesh.drive(ask(link, step(1, session="t")))


async def test_no_wait_is_longer_than_the_bound(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """However busy the node says it is."""
    node.script = lambda _step, count: Drop() if count else None
    await mesh.drive(ask(link))
    asked = ask(link, step(1))
    started_s = mesh.clock.monotonic()
    while not asked.done():
        await mesh.drive(mesh.clock.sleep(1.0))
        node.busy_us += 1_000_000
    with pytest.raises(DeadlineExceeded):
        await asked
    assert STEP_WAIT_MAX_S < mesh.clock.monotonic() - started_s < STEP_WAIT_MAX_S + 2


async def test_it_reconnects_for_ever(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """With growing pauses, and the pauses start small again."""
    node.stop()
    await mesh.drive(mesh.clock.sleep(600.0))
    assert not link.is_open
    assert 290 < node.dials < 700
    node.reachable = True
    await mesh.until(lambda: link.is_open)
    assert link.connects == 2
    node.cut()
    started_s = mesh.clock.monotonic()
    await mesh.until(lambda: link.is_open and link.connects == 3)
    assert mesh.clock.monotonic() - started_s < 0.1


async def test_a_refusal_is_kept_for_people_and_tried_again(
    mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink
) -> None:
    """A wrong token or model is shown, not hidden behind `unreachable`."""
    node.refusal = HandshakeRefused("unauthorized", "the mesh token is wrong")
    node.cut()
    await mesh.drive(mesh.clock.sleep(5.0))
    assert link.last_error is not None
    assert link.last_error.code == "unauthorized"
    node.refusal = None
    await mesh.until(lambda: link.is_open)
    assert link.last_error is None


async def test_a_new_process_is_measured_anew(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """Its first step may be slow again; the same process keeps its measurements."""
    await mesh.drive(ask(link))
    node.cut()
    await mesh.until(lambda: link.is_open and link.connects == 2)
    assert link.pace.decode_s is not None
    node.restart()
    await mesh.until(lambda: link.is_open and link.connects == 3)
    assert link.pace.decode_s is None


async def test_releases_reach_a_process_that_was_out_of_reach(
    mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink
) -> None:
    """A link that was down for a moment leaves no session behind."""
    await mesh.drive(ask(link))
    node.reachable = False
    node.cut()
    await mesh.until(lambda: not link.is_open)
    link.post(Release(session="s"))
    assert "s" in node.sessions
    node.reachable = True
    await mesh.until(lambda: link.is_open)
    await idle()
    assert node.ended == [Release(session="s")]


async def test_a_release_posted_in_the_moment_the_link_breaks_is_kept(
    mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink
) -> None:
    """Sending it fails, and it leaves again over the next link."""
    await mesh.drive(ask(link))
    node.cut()
    link.post(Release(session="s"))
    await mesh.until(lambda: link.connects == 2)
    await idle()
    assert node.ended == [Release(session="s")]


async def test_a_fork_is_not_kept_for_later(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """What it copies may be another state by then; the copy's first decode is a miss."""
    await mesh.drive(ask(link))
    fork = Fork(session="s", target="t", past_len=1, layers=node.layers, model=MODEL)
    node.reachable = False
    node.cut()
    await mesh.until(lambda: not link.is_open)
    link.post(fork)
    mesh.mesh.fork("a", fork)
    node.reachable = True
    await mesh.until(lambda: link.is_open)
    await idle()
    assert node.forks == []
    mesh.mesh.fork("a", fork)
    await idle()
    assert node.forks == [fork]
    assert set(node.sessions) == {"s", "t"}


async def test_releases_for_a_process_that_is_gone_are_forgotten(
    mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink
) -> None:
    """The new process never held those sessions; and there is a bound on what is kept."""
    node.stop()
    await mesh.until(lambda: not link.is_open)
    for number in range(UNSENT_MAX + 10):
        link.post(Cancel(session=f"s{number}"))
    assert len(link._outbox._unsent) == UNSENT_MAX
    node.reachable = True
    await mesh.until(lambda: link.is_open)
    await idle()
    assert node.ended == []


async def test_a_node_that_reads_nothing_loses_its_link(link: NodeLink, mesh: ScriptedMesh) -> None:
    """The outbox is bounded."""
    for number in range(OUTBOX_MESSAGES_MAX + 1):
        link.post(Release(session=f"s{number}"))
    await idle()
    assert not link.is_open
    assert link.last_error is not None
    assert link.last_error.code == "outbox_full"


async def test_a_heartbeat_measures_the_round_trip(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """Every half second, and when somebody asks."""
    heartbeats = node.heartbeats
    await mesh.drive(mesh.clock.sleep(10.0))
    assert node.heartbeats - heartbeats == 20
    await mesh.drive(link.measure())
    assert link.round_trip_s == 0.0
    assert link.stats is not None


async def test_measuring_fails_with_the_link(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """Nobody waits for figures of a node that is gone."""
    node.stalled = True
    with pytest.raises(LinkClosed):
        await mesh.drive(link.measure())
    node.reachable = False
    with pytest.raises(LinkClosed):
        await link.measure()


async def test_heartbeats_without_answer_are_bounded(node: ScriptedNode, link: NodeLink) -> None:
    """Asking for figures again and again keeps no more than this."""
    node.stalled = True
    tasks = [asyncio.create_task(link.measure()) for _ in range(HEARTBEATS_OPEN_MAX + 1)]
    results = await asyncio.gather(*tasks[-1:], return_exceptions=True)
    assert isinstance(results[0], LinkClosed)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_node_may_ask_for_a_heartbeat_too(node: ScriptedNode) -> None:
    """It learns that its gateway lives."""
    answered: list[Heartbeat] = []
    receive = node.receive

    def spy(link: object, data: bytes) -> None:
        if b'"seq":99' in data and b'"reply":true' in data:
            answered.append(Heartbeat(seq=99, reply=True))
        else:
            receive(link, data)  # type: ignore[arg-type]

    node.receive = spy  # type: ignore[method-assign]
    node.tell(Heartbeat(seq=99))
    node.tell(Heartbeat(seq=12345, reply=True))
    await idle()
    assert len(answered) == 1


async def test_what_a_node_announces_is_known(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """Loading, loaded, draining; what does not matter to a gateway is ignored."""
    node.tell(LoadProgress(done_bytes=1, total_bytes=2))
    node.tell(Unsupported(unsupported="x"))
    node.tell(Error(code="odd", message="a complaint about the link"))
    await idle()
    assert link.load_progress == (1, 2)
    node.become(create_node(mesh.clock, "a", "0:3").info)
    await idle()
    assert link.load_progress != (1, 2)
    assert link.info is not None
    assert link.info.layers == LayerRange(0, 3)
    node.tell(Drain())
    await idle()
    assert link.info.state == "draining"


async def test_counters_survive_reconnecting(mesh: ScriptedMesh, node: ScriptedNode, link: NodeLink) -> None:
    """Figures rise from the gateway's start."""
    await mesh.drive(ask(link))
    node.cut()
    await mesh.until(lambda: link.is_open and link.connects == 2)
    await mesh.drive(ask(link, step(1)))
    counters = link.counters()
    assert counters.sent_frames["step"] == 2
    assert counters.received_frames["step_result"] == 2
    assert counters.received_bytes["step_result"] > 0
