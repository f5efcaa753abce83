"""The step that follows from a session's state, and what its answer does to that state."""

from __future__ import annotations

from gateway.journal import HopInputs, StepInput, ids_input
from gateway.probe import Asked
from gateway.session import Session
from shared.messages import Step, StepResult
from shared.tensor_spec import WireTensor

NOTHING = Asked()


class ReplayNeeded(Exception):
    """A stateless hop must be given everything that has entered it, which only a replay can: not a failure."""


def plan_step(session: Session, index: int, entering: StepInput, output_len: int) -> tuple[Step, dict[str, WireTensor]]:
    """The step that brings a hop from what it holds through `entering`, which is in its journal already.

    Args:
        session: The session.
        index: The hop.
        entering: The input right after `held_len`; for a stateless hop, the newest part of its journal.
        output_len: How many of the last outputs are needed.

    Returns:
        The step, and the tensors that travel with it.

    Raises:
        ReplayNeeded: A stateless hop needs its whole journal, which has been dropped.
    """
    hop = session.hops[index]
    if hop.mode == "stateless":
        entering = _everything(hop.journal, entering)
    decodes = hop.held_len > 0
    is_last = session.is_last(index)
    # A last hop draws after the last position whatever its output_len; absent keeps the header short.
    wants_all = output_len == entering.new_len or (output_len == 1 and is_last)
    asked = _asked(session, hop.held_len, entering.new_len) if is_last else NOTHING
    step = Step(
        session=session.id,
        step_index=session.step_index,
        epoch=session.epoch,
        cache=None if hop.mode == "stateless" else "decode" if decodes else "prefill",
        past_len=hop.held_len,
        new_len=entering.new_len,
        layers=hop.layers,
        model=session.model,
        output_len=None if wants_all else output_len,
        sampling=session.sampling if is_last and not decodes else None,
        route=None if decodes else session.route,
        score=asked.score,
        pool=asked.pool,
    )
    return step, {**_ids_beside(session, index, hop.held_len, entering), **entering.tensors(), **asked.tensors}


def _asked(session: Session, start: int, new_len: int) -> Asked:
    return (session.probe.ask(start, new_len) if session.probe is not None else None) or NOTHING


def _ids_beside(session: Session, index: int, start: int, entering: StepInput) -> dict[str, WireTensor]:
    """Which tokens stand at the step's positions, for a hop that is not first and depends on them."""
    draws = session.is_last(index) and session.sampling.needs_history
    if not index or not (draws or session.hops[index].needs_token_ids):
        return {}
    named = ids_input(session.ids[start : start + entering.new_len])
    return named.tensors()


def _everything(journal: HopInputs, entering: StepInput) -> StepInput:
    if entering.new_len == journal.length:
        return entering
    if not journal.holds(journal.length):
        raise ReplayNeeded
    (whole,) = journal.batches(journal.length)
    return whole


def accept(session: Session, index: int, step: Step, result: StepResult) -> None:
    """Take in that a hop has answered a step: from now on it holds the step's positions."""
    hop = session.hops[index]
    if step.cache is None:
        return
    if result.cached:
        hop.held_len = step.past_len + step.new_len
        return
    hop.forget()
    hop.set_mode("stateless")
