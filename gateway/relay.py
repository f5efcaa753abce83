"""One step at one hop: send it, wait, take in the answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.admission import Admission
from gateway.figures import Figures
from gateway.journal import Journal, StepInput
from gateway.mesh import Mesh
from gateway.session import Session
from gateway.step_answer import Drawn, hidden_states, read_drawn
from gateway.step_plan import accept, plan_step
from gateway.waits import Answer
from shared.clock import Clock
from shared.errors import CacheMissed, LinkClosed, MeshError
from shared.messages import Step

PATIENCE_MAX = 16.0
"""Each missed deadline doubles the next one's allowance, up to this."""


@dataclass(slots=True)
class Trouble:
    """What has gone wrong at one hop since its last answer to a pass.

    Args:
        recoveries: Times it was rebuilt or moved.
        refusals: Times a node answered with an error.
        stalls: Deadlines missed.
        waited_s: Seconds spent waiting for a place on a node for it.
        without_node_s: Of these, seconds in which no node could have served it, however free.
    """

    recoveries: int = 0
    refusals: int = 0
    stalls: int = 0
    waited_s: float = 0.0
    without_node_s: float = 0.0


@dataclass(slots=True, eq=False)
class Generation:
    """A generation under way: its session, and what it acts through.

    Args:
        session: Positions, hops, journals.
        mesh: The nodes.
        admission: Holds its reservations.
        journal: Keeps what its hops were given.
        clock: Time.
        failover_timeout_s: How long a hop may be without any node.
        request_id: For logs.
        began_at: When it had its place, on the clock.
        figures: What it did so far.
        visited: Ids of all nodes that may hold the session.
        trouble: By hop, what the pass under way has met.
    """

    session: Session
    mesh: Mesh
    admission: Admission
    journal: Journal
    clock: Clock
    failover_timeout_s: float
    request_id: str
    began_at: float
    figures: Figures = field(default_factory=Figures)
    visited: dict[str, None] = field(default_factory=dict)
    trouble: dict[int, Trouble] = field(default_factory=dict)

    def end_pass(self) -> None:
        """The pass under way is complete: whatever went wrong is history."""
        self.session.end_pass()
        self.figures.passes += 1
        if self.trouble:
            self.trouble = {}


Answered = StepInput | Drawn | None
"""What enters the next hop; what the last hop drew; None where neither was asked for."""


class HopFailed(Exception):
    """A hop gave no answer to a step. Always recovered from or turned into a `GenerationFailed`."""

    def __init__(self, index: int, error: MeshError) -> None:
        super().__init__(f"hop {index}: {error}")
        self.index = index
        self.error = error


async def advance(generation: Generation, index: int, entering: StepInput, output_len: int) -> Answered:
    """Give a hop the input that follows what it holds, in whichever mode it is served.

    Args:
        generation: Whose.
        index: The hop.
        entering: Already in the hop's journal.
        output_len: Outputs wanted.

    Raises:
        HopFailed: The hop gave no answer.
        ReplayNeeded: The hop is stateless and its journal has been dropped.
    """
    session = generation.session
    step, tensors = plan_step(session, index, entering, output_len)
    node = session.hops[index].node
    link = generation.mesh.link(node)
    try:
        if link is None:
            raise LinkClosed("no_link", f"{node} is not connected", node=node)
        generation.visited[node] = None
        generation.figures.steps += 1
        trouble = generation.trouble.get(index)
        patience = min(PATIENCE_MAX, 2.0**trouble.stalls) if trouble else 1.0
        answer = await link.ask(step, tensors, patience=patience)
        answered = _read(session, index, step, output_len, answer)
    except MeshError as error:
        _count_failure(generation.figures, error)
        raise HopFailed(index, error) from error
    accept(session, index, step, answer[0])
    return answered


def _read(session: Session, index: int, step: Step, output_len: int, answer: Answer) -> Answered:
    result, tensors = answer
    if session.probe is not None and (step.score is not None or step.pool is not None):
        session.probe.take(step.past_len, step.new_len, tensors)
    if not output_len:
        return None
    if session.is_last(index):
        return read_drawn(result, tensors, session.sampling.logprobs, session.vocab_size)
    return hidden_states(tensors, output_len)


def _count_failure(figures: Figures, error: MeshError) -> None:
    if isinstance(error, CacheMissed):
        figures.misses[error.reason] += 1
    else:
        figures.failures[error.code] += 1
