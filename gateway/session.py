"""One generation's state along its route, and the steps that follow from it.

Theory of operation. Three positions matter, all of them counts of positions since the start:

``session.passed``   positions whose pass over the whole route is complete
``session.pass_end`` where the pass under way will end: positions [passed, pass_end) are in it
``hop.journal.length`` positions that have entered a hop: `pass_end` for hops that the pass has
                     reached, `passed` for those it has not
``hop.held_len``     positions that the hop's node has confirmed to hold; 0 when it must be prefilled

Each hop is served in one of two ways. *Cached*: the node holds `held_len` positions and is given what is
new. *Stateless*: the node keeps nothing (caching is off there, or it said so) and is given the whole
journal each time. Nothing here waits or sends; `plan_step` says what to send and `accept` takes in
what was answered.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.journal import HopInputs, IdInputs, Journal, StepInput, TensorInputs, ids_input
from shared.errors import StepFailed
from shared.layers import LayerRange
from shared.messages import NodeInfo, SamplingParams, Step, StepResult
from shared.route import Hop, Route
from shared.tensor_spec import WireTensor

TOKEN_ID_MAX = 2**31 - 1
"""Token ids travel as i32."""

Mode = Literal["cached", "stateless"]


@dataclass(slots=True)
class HopState:
    """One hop of a session.

    Args:
        node: Id of the node that serves it now.
        layers: The range it covers; never changes.
        dtype: Element type in which it is computed; never changes.
        journal: What has entered it.
        mode: Whether its node keeps the session.
        held_len: Positions that its node has confirmed to hold.
    """

    node: str
    layers: LayerRange
    dtype: str
    journal: HopInputs
    mode: Mode = "cached"
    held_len: int = 0

    def place(self, node: NodeInfo) -> None:
        """Serve the hop by this node from now on, which holds nothing of the session yet."""
        self.node = node.node
        self.forget()
        self.set_mode("cached" if node.kv_cache else "stateless")

    def forget(self) -> None:
        """What the node holds is not known to be right any more: prefill before anything else."""
        self.held_len = 0

    def set_mode(self, mode: Mode) -> None:
        """Change how the hop is served; a stateless hop's journal is the last to be dropped."""
        self.mode = mode
        if isinstance(self.journal, TensorInputs):
            self.journal.read_each_step = mode == "stateless"


@dataclass(slots=True, eq=False)
class Session:
    """A generation along its route. Made by `create_session`.

    Args:
        id: Unique across gateways.
        model: The model's fingerprint.
        sampling: How the last hop draws tokens.
        ids: Prompt and answer so far.
        hops: In the order in which hidden states travel.
        chunk_tokens: The most positions that enter with one cached step.
        reencodes: The last node answers with text: every token is a prefill of everything.
        epoch: Rises with each recovery.
        step_index: Number of the step under way.
        passed: See the module's docstring.
        pass_end: See the module's docstring.
        samples: Whether the pass under way ends with a token.
    """

    id: str
    model: str
    sampling: SamplingParams
    ids: array[int]
    hops: list[HopState]
    chunk_tokens: int
    reencodes: bool = False
    epoch: int = 0
    step_index: int = -1
    passed: int = 0
    pass_end: int = 0
    samples: bool = False
    _route: Route | None = field(default=None, repr=False)

    @property
    def route(self) -> Route:
        """The route as it is now."""
        if self._route is None:
            self._route = Route(tuple(Hop(hop.node, hop.layers) for hop in self.hops))
        return self._route

    def is_last(self, index: int) -> bool:
        """Whether this hop draws the token."""
        return index == len(self.hops) - 1

    def is_reached(self, index: int) -> bool:
        """Whether the pass under way has entered this hop already."""
        return self.hops[index].journal.length == self.pass_end

    def restart(self) -> None:
        """Begin again with a prefill of everything at every hop."""
        self.passed = 0
        self.pass_end = 0
        for hop in self.hops:
            hop.journal.restart()
            hop.forget()

    def chunk_ends(self) -> list[int]:
        """Where the passes of a prefill end: chunks, or all at once when a hop needs everything each time."""
        total = len(self.ids)
        if any(hop.mode == "stateless" for hop in self.hops):
            return [total]
        return [*range(self.chunk_tokens, total, self.chunk_tokens), total]

    def begin_pass(self, end: int) -> StepInput:
        """Start the pass over positions [passed, end); returns what enters the first hop."""
        self.begin_step()
        self.pass_end = end
        self.samples = end == len(self.ids)
        return ids_input(self.ids[self.passed : end])

    def end_pass(self) -> None:
        """The last hop has answered."""
        self.passed = self.pass_end

    def begin_step(self) -> None:
        """Number the next step: a pass, or one batch of a replay. No hop sees a number twice."""
        self.step_index += 1

    def begin_epoch(self) -> None:
        """A hop is about to be replayed or moved: answers to anything sent before are void."""
        self.epoch += 1
        self._route = None

    def output_len(self, index: int, new_len: int) -> int:
        """Outputs that the pass under way still owes: none from a last hop that need not draw a token yet."""
        if self.is_last(index):
            return int(self.samples)
        return min(new_len, self.pass_end - self.passed)

    def source_of(self, index: int) -> int:
        """The nearest hop, from this one backwards, whose journal can feed a replay up to `pass_end`."""
        for source in range(index, 0, -1):
            if self.hops[source].journal.holds(self.pass_end):
                return source
        return 0

    def close(self) -> None:
        """Give the journals' memory back."""
        for hop in self.hops:
            hop.journal.close()


def create_session(
    session_id: str,
    *,
    route: Route,
    nodes: Mapping[str, NodeInfo],
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    model: str,
    chunk_tokens: int,
    journal: Journal,
) -> Session:
    """A session at position 0 of everything.

    Args:
        session_id: Unique across gateways.
        route: The admitted route.
        nodes: The nodes of the route by id.
        prompt_ids: At least one id.
        sampling: Given to the last hop.
        model: The model's fingerprint.
        chunk_tokens: The most positions that enter with one cached step.
        journal: Where the hops' journals are kept.
    """
    ids = array("i", prompt_ids)
    inputs: list[HopInputs] = [IdInputs(ids), *(journal.open() for _ in route.hops[1:])]
    hops = [
        HopState(hop.node, hop.layers, nodes[hop.node].dtype, held)
        for hop, held in zip(route.hops, inputs, strict=True)
    ]
    for hop in hops:
        hop.place(nodes[hop.node])
    reencodes = not nodes[hops[-1].node].token_ids
    return Session(session_id, model, sampling, ids, hops, chunk_tokens, reencodes)


def plan_step(session: Session, index: int, entering: StepInput, output_len: int) -> tuple[Step, StepInput]:
    """The step that brings a hop from what it holds through `entering`, which is in its journal already.

    Args:
        session: The session.
        index: The hop.
        entering: The input right after `held_len`; for a stateless hop, the newest part of its journal.
        output_len: How many of the last outputs are needed.

    Raises:
        ReplayNeeded: A stateless hop needs its whole journal, which has been dropped.
    """
    hop = session.hops[index]
    if hop.mode == "stateless":
        entering = _everything(hop.journal, entering)
    decodes = hop.held_len > 0
    # A last hop draws after the last position whatever its output_len; absent keeps the header short.
    wants_all = output_len == entering.new_len or (output_len == 1 and session.is_last(index))
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
        sampling=session.sampling if session.is_last(index) and not decodes else None,
        route=None if decodes else session.route,
    )
    return step, entering


class ReplayNeeded(Exception):
    """A stateless hop must be given everything that has entered it, which only a replay can: not a failure."""


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


def hidden_states(tensors: Mapping[str, WireTensor], new_len: int) -> StepInput:
    """What a hop that is not last hands to the next one, exactly as it came.

    Raises:
        StepFailed: `bad_answer`: it sent none.
    """
    tensor = tensors.get("hidden_states")
    if tensor is None:
        raise StepFailed("bad_answer", "a hop that is not last answered without hidden_states")
    return StepInput("hidden_states", tensor, new_len)


def drawn_token(result: StepResult) -> int | None:
    """The token id that a last hop drew; None when it answered with text.

    Raises:
        StepFailed: `bad_answer`: neither, or no id that a model can have.
    """
    if result.token_ids is None:
        if result.text is None:
            raise StepFailed("bad_answer", "the last hop answered with neither token_ids nor text")
        return None
    if len(result.token_ids) != 1 or not 0 <= result.token_ids[0] <= TOKEN_ID_MAX:
        raise StepFailed("bad_answer", "the last hop must answer with one token id that fits in 31 bits")
    return result.token_ids[0]
