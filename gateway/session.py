"""One generation's state along its route, and the steps that follow from it.

Theory of operation. Three positions matter, all of them counts of positions since the start:

``session.passed``   positions whose pass over the whole route is complete
``session.pass_end`` where the pass under way will end: positions [passed, pass_end) are in it
``hop.journal.length`` positions that have entered a hop: `pass_end` for hops that the pass has
                     reached, `passed` for those it has not
``hop.held_len``     positions that the hop's node has confirmed to hold; 0 when it must be prefilled

Each hop is served in one of two ways. *Cached*: the node holds `held_len` positions and is given what is
new. *Stateless*: the node keeps nothing (caching is off there, or it said so) and is given the whole
journal each time. Nothing here waits or sends; `gateway.step_plan` says what to send and takes in what was
answered.

A session can be forked (`fork_session`): the copy has the same positions behind it, shares the journals' content, and
goes on by itself. Where a node has not made its copy, its first decode is a miss like any other.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gateway.journal import HopInputs, IdInputs, Journal, StepInput, TensorInputs, ids_input
from gateway.needs import Needs
from gateway.probe import Probe
from shared.layers import LayerRange
from shared.messages import NodeInfo, SamplingParams
from shared.route import Hop, Route

Mode = Literal["cached", "stateless"]


@dataclass(slots=True)
class HopState:
    """One hop of a session.

    Args:
        node: Id of the node that serves it now.
        layers: The range it covers; never changes. A session that is cut otherwise gets other hops.
        precision: In which it is computed, as `NodeInfo.precision`; never changes.
        journal: What has entered it.
        mode: Whether its node keeps the session.
        held_len: Positions that its node has confirmed to hold.
        needs_token_ids: Its node wants token ids beside hidden states.
    """

    node: str
    layers: LayerRange
    precision: str
    journal: HopInputs
    mode: Mode = "cached"
    held_len: int = 0
    needs_token_ids: bool = False

    def place(self, node: NodeInfo) -> None:
        """Serve the hop by this node from now on, which holds nothing of the session yet."""
        self.node, self.needs_token_ids = node.node, node.needs_token_ids
        self.forget()
        self.set_mode("cached" if node.kv_cache else "stateless")

    def forget(self) -> None:
        """What the node holds is not known to be right any more: prefill before anything else."""
        self.held_len = 0

    def fork(self, journal: HopInputs) -> HopState:
        """The hop of a fork, over its copy of the journal."""
        return replace(self, journal=journal)

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
        needs: What its nodes must be able to do.
        probe: What is asked of the last hop beside tokens.
        draws: Whether the pass that ends with the last id draws a token.
        vocab_size: Entries of the model's vocabulary; None where that is not known.
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
    needs: Needs = field(default_factory=Needs)
    probe: Probe | None = None
    draws: bool = True
    vocab_size: int | None = None
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

    def recut(self, nodes: Sequence[NodeInfo], journal: Journal) -> None:
        """Go on over other ranges, beginning again with a prefill of everything.

        Args:
            nodes: Cover all layers once, in order.
            journal: Where the new hops' journals are kept.
        """
        self.close()
        self.hops = create_hops(self.ids, nodes, journal)
        self.passed = self.pass_end = 0
        self.begin_epoch()

    def chunk_ends(self, end: int) -> list[int]:
        """Where the passes of a prefill end: chunks, or all at once when a hop needs everything each time."""
        if any(hop.mode == "stateless" for hop in self.hops):
            return [end]
        return [*range(self.chunk_tokens, end, self.chunk_tokens), end]

    def begin_pass(self, end: int) -> StepInput:
        """Start the pass over positions [passed, end); returns what enters the first hop."""
        self.begin_step()
        self.pass_end = end
        self.samples = self.draws and end == len(self.ids)
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
    needs: Needs | None = None,
    probe: Probe | None = None,
    draws: bool = True,
    vocab_size: int | None = None,
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
        needs: What its nodes must be able to do; None for nothing in particular.
        probe: What is asked of the last hop beside tokens.
        draws: Whether tokens are drawn at all.
        vocab_size: Entries of the model's vocabulary; None where that is not known.
    """
    ids = array("i", prompt_ids)
    hops = create_hops(ids, [nodes[hop.node] for hop in route.hops], journal)
    reencodes = not nodes[hops[-1].node].token_ids
    return Session(
        session_id,
        model,
        sampling,
        ids,
        hops,
        chunk_tokens,
        needs or Needs(),
        probe,
        draws,
        vocab_size=vocab_size,
        reencodes=reencodes,
    )


def create_hops(ids: array[int], nodes: Sequence[NodeInfo], journal: Journal) -> list[HopState]:
    """The hops over these nodes in order, none of which holds anything yet; the first is fed with `ids`."""
    inputs: list[HopInputs] = [IdInputs(ids), *(journal.open() for _ in nodes[1:])]
    hops = [HopState(node.node, node.layers, node.precision, held) for node, held in zip(nodes, inputs, strict=True)]
    for hop, node in zip(hops, nodes, strict=True):
        hop.place(node)
    return hops


def fork_session(source: Session, session_id: str, sampling: SamplingParams) -> Session:
    """A copy that goes on from between two passes of the source, drawing tokens in its own way.

    Args:
        source: Stays as it is.
        session_id: The copy's, unique across gateways.
        sampling: The copy's.

    Raises:
        ValueError: A pass is under way, or none has ended.
    """
    if not 0 < source.passed == source.pass_end:
        raise ValueError(f"a session forks between two passes, not at {source.passed} of {source.pass_end}")
    ids = array("i", source.ids)
    hops = [source.hops[0].fork(IdInputs(ids, source.passed))]
    for hop in source.hops[1:]:
        assert isinstance(hop.journal, TensorInputs)  # noqa: S101 - only the first hop is fed with ids
        hops.append(hop.fork(hop.journal.copy()))
    return replace(source, id=session_id, sampling=sampling, ids=ids, hops=hops, probe=None, _route=None)
