"""A hop that gave no answer is rebuilt, alone, and gives it.

Theory of operation. `serve` brings one hop through the newest input and always ends with that hop's
answer or with an error for the client. The input enters the journal first; from then on "rebuild this
hop from its journal" and "answer this step" are the same thing, so every failure has the same cure:

1. `judge` (pure) says what a failure calls for: the same node, another one, no cache at all, or the end;
2. `settle` waits for a node to serve the hop: the same one, or a replica of its range;
3. `replay` gives that node the whole journal under a higher epoch. The other hops are not touched. If
   the journal was dropped, the replay starts at the nearest earlier hop whose journal is whole, whose
   outputs become the missing journal again.

A replay may fail like any step, at any of the hops it rebuilds; it then begins again after the same
three steps. What bounds this: recoveries per hop and pass, refusals per hop and pass, and the time
that a hop may be without a node. A hop whose place was given to another session (`gateway.giving_way`)
is rebuilt in the same way when its turn comes, once `regain` has found it a place.

Where no node can serve the hop any more, but others cover all layers between them, cut elsewhere, the session is led
over those: `RouteLost` says so to `gateway.passes`, and `gateway.reroute` does it. A hop whose node is about to leave
is moved before it is lost.
"""

from __future__ import annotations

from typing import Literal

import structlog

from gateway.errors import GenerationFailed
from gateway.journal import StepInput
from gateway.placing import has_place, leave, settle
from gateway.relay import Answered, Generation, HopFailed, Trouble, advance
from gateway.session import HopState, Session
from gateway.step_plan import ReplayNeeded
from shared.errors import CALLERS_FAULTS, CacheMissed, DeadlineExceeded, LinkClosed, MeshError, StepFailed

RECOVERIES_PER_PASS_MAX = 8
"""Of one hop, without it answering the pass: enough for a node that restarts again and again for a while,
few enough that two generations that evict each other do not go on for ever."""
REFUSALS_PER_PASS_MAX = 3
"""A step that so many attempts answer with an error is at fault itself."""
STALLS_PER_PASS_MAX = 3
"""A hop that answers heartbeats and no steps is asked again so often, each time with more patience, then given up."""
RETRY_FIRST_S = 0.05
RETRY_MAX_S = 1.0
"""Pause before the second and later recoveries of a hop: it doubles between these."""
EVERYTHING = 2**31
"""Positions in one step when a stateless hop needs them all."""

Action = Literal["here", "anywhere", "elsewhere", "stateless", "give_up"]
"""What to do about a hop: rebuild it at the same node; at whichever is there; rather at another one;
serve it without a cache; end the generation."""

LOST_PLACE: frozenset[str] = frozenset({"stale_epoch", "duplicate_step", "cancelled"})
"""Errors that say that the node's idea of the session is not ours: rebuilt, it serves the step."""
BUSY: frozenset[str] = frozenset({"queue_full", "not_ready", "draining", "session_busy"})
"""Errors that say that the node cannot take the step now; they say nothing against the step."""
OUTGROWN: frozenset[str] = frozenset({"kv_budget_exceeded"})
"""Errors that say that no cache of the node is large enough: it can still compute, at the old cost."""
WRONG_NODE: frozenset[str] = frozenset({"range_mismatch", "model_mismatch"})
"""Misses that a rebuild at the same node cannot cure."""

log = structlog.stdlib.get_logger(__name__)


async def serve(generation: Generation, index: int, entering: StepInput) -> Answered:
    """Bring a hop through the next input of the pass under way, whatever it takes.

    Args:
        generation: Whose.
        index: The hop; all earlier ones have answered.
        entering: What comes out of the hop before.

    Raises:
        RouteLost: Other nodes, cut elsewhere, must serve the session from here on.
        GenerationFailed: The hop cannot be brought to answer.
    """
    session = generation.session
    session.hops[index].journal.append(entering)
    failure: HopFailed | None = None
    is_leaving = generation.mesh.is_leaving(session.hops[index].node)
    if has_place(generation, index) and not (is_leaving and leave(generation, index)):
        try:
            return await advance(generation, index, entering, session.output_len(index, entering.new_len))
        except ReplayNeeded:
            pass  # nothing has failed: the hop is rebuilt below, with what entered it now
        except HopFailed as failed:
            failure = failed
    started_at = generation.clock.monotonic()
    while True:
        if failure is not None:
            await relocate(generation, failure)
        await regain(generation, index)
        try:
            answered = await replay(generation, index)
        except ReplayNeeded:
            failure = None
        except HopFailed as failed:
            failure = failed
        else:
            _note_recovery(generation, index, generation.clock.monotonic() - started_at)
            return answered


def _note_recovery(generation: Generation, index: int, took_s: float) -> None:
    session = generation.session
    generation.figures.recovering_s += took_s
    log.info(
        "hop.recovered",
        session=session.id,
        node=session.hops[index].node,
        hop=index,
        epoch=session.epoch,
        recovering_ms=round(took_s * 1000, 1),
    )


async def replay(generation: Generation, index: int) -> Answered:
    """Rebuild a hop from its journal, or from the nearest earlier one that is whole; returns its answer.

    Raises:
        HopFailed: A hop that is being rebuilt gave no answer.
        ReplayNeeded: A hop has turned out stateless half-way; begin again.
    """
    session = generation.session
    source = session.source_of(index)
    rebuilt = range(source, index + 1)
    _begin_replay(generation, source, index)
    batch_tokens = _batch_tokens(session, rebuilt)
    answered: Answered = None
    entered = 0
    for batch in session.hops[source].journal.batches(batch_tokens):
        if batch_tokens != _batch_tokens(session, rebuilt):
            raise ReplayNeeded
        session.begin_step()
        entered += batch.new_len
        answered = batch
        for i in rebuilt:
            assert isinstance(answered, StepInput)  # noqa: S101 - hops before the last rebuilt give all outputs
            if i > source:
                session.hops[i].journal.append(answered)
            answered = await advance(generation, i, answered, _wanted(session, i, index, answered.new_len, entered))
    return answered


def _batch_tokens(session: Session, hops: range) -> int:
    """A stateless hop takes all positions at once, and so must those that are rebuilt with it."""
    return EVERYTHING if any(session.hops[i].mode == "stateless" for i in hops) else session.chunk_tokens


def _wanted(session: Session, i: int, index: int, new_len: int, entered: int) -> int:
    """Outputs that a replay of hop `index` wants from hop `i`: all, none, or what the pass still owes."""
    if i < index:
        return new_len
    return session.output_len(i, new_len) if entered == session.pass_end else 0


def _begin_replay(generation: Generation, source: int, index: int) -> None:
    session, figures = generation.session, generation.figures
    session.begin_epoch()
    for hop in session.hops[source : index + 1]:
        hop.forget()
    for hop in session.hops[source + 1 : index + 1]:
        hop.journal.restart()
    figures.replays += 1
    figures.full_replays += source < index
    log.info(
        "hop.replayed",
        session=session.id,
        node=session.hops[index].node,
        hop=index,
        source=source,
        positions=session.pass_end,
        epoch=session.epoch,
    )


async def relocate(generation: Generation, failure: HopFailed) -> None:
    """Decide who serves a hop that has failed, and put the hop there. Nothing is sent yet.

    Raises:
        GenerationFailed: Nobody can.
    """
    session, index, error = generation.session, failure.index, failure.error
    hop = session.hops[index]
    trouble = generation.trouble.setdefault(index, Trouble())
    action = judge(error, trouble)
    log.warning("hop.failed", session=session.id, node=hop.node, hop=index, code=error.code, action=action)
    if action == "give_up":
        raise _given_up(hop, error, trouble) from error
    if action == "stateless":
        hop.forget()
        hop.set_mode("stateless")
        return
    if trouble.recoveries > 1:
        await generation.clock.sleep(min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** (trouble.recoveries - 2)))
    await settle(generation, index, avoid=action == "elsewhere")


async def regain(generation: Generation, index: int) -> None:
    """Find places for the hops of a replay that have given theirs to others while the session waited.

    Raises:
        RouteLost: As `settle`.
        GenerationFailed: As `settle`.
    """
    while True:
        replayed = range(generation.session.source_of(index), index + 1)
        given = next((i for i in replayed if not has_place(generation, i)), None)
        if given is None:
            return
        await settle(generation, given)


def judge(error: MeshError, trouble: Trouble) -> Action:
    """What a failure calls for. Counts it in `trouble`, which also bounds how often there is a next time."""
    trouble.recoveries += 1
    if trouble.recoveries > RECOVERIES_PER_PASS_MAX:
        return "give_up"
    match error:
        case CacheMissed():
            return _judge_miss(error)
        case LinkClosed():
            return "anywhere"
        case DeadlineExceeded():
            trouble.stalls += 1
            return "elsewhere" if trouble.stalls <= STALLS_PER_PASS_MAX else "give_up"
        case StepFailed():
            return _judge_refusal(error, trouble)
        case _:
            return "give_up"


def _judge_miss(miss: CacheMissed) -> Action:
    if miss.reason == "disabled":
        return "stateless"
    return "elsewhere" if miss.reason in WRONG_NODE else "here"


def _judge_refusal(error: StepFailed, trouble: Trouble) -> Action:
    if error.code in CALLERS_FAULTS:
        return "give_up"
    if error.code in LOST_PLACE:
        return "here"
    if error.code in OUTGROWN:
        return "stateless"
    trouble.refusals += error.code not in BUSY
    return "elsewhere" if trouble.refusals <= REFUSALS_PER_PASS_MAX else "give_up"


def _given_up(hop: HopState, error: MeshError, trouble: Trouble) -> GenerationFailed:
    fields = {"node": hop.node, "layers": str(hop.layers), "recoveries": trouble.recoveries}
    if trouble.recoveries > RECOVERIES_PER_PASS_MAX:
        what = f"layers {hop.layers} gave no answer after {RECOVERIES_PER_PASS_MAX} recoveries"
        return GenerationFailed("no_progress", f"{what}, the last time: {error.message}", **fields)
    return GenerationFailed(error.code, f"{hop.node} ({hop.layers}): {error.message}", **fields)
