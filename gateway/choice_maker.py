"""The choices of one request, each in a session of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.admission import Admitted
from gateway.choice import Choice
from gateway.generation_request import GenerationRequest, PromptScores
from gateway.lifecycle import Lifecycle
from gateway.passes import EncodeText
from gateway.prompt_scores import PromptScorer
from gateway.relay import Generation
from gateway.session import Session, fork_session
from shared.messages import Fork, SamplingParams

CreateSession = Callable[[str, Admitted, SamplingParams, PromptScorer | None], Session]
"""A session of an admitted wave, at position 0 of the request's prompt."""
FORK = "fork"
"""What nodes call the ability to copy a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceMaker:
    """Makes the choices of one request.

    Args:
        request: What is asked for.
        create_session: Makes sessions.
        lifecycle: Begins generations.
        encode_text: For a last hop that answers with text.
        scorer: Scores the prompt, in the first choice; None where nobody asks.
        queued_s: How long the request waited for its first places.
    """

    request: GenerationRequest
    create_session: CreateSession
    lifecycle: Lifecycle
    encode_text: EncodeText
    scorer: PromptScorer | None = None
    queued_s: float = 0.0

    @property
    def prompt_scores(self) -> PromptScores:
        """Of the request; empty where nobody asks."""
        return PromptScores() if self.scorer is None else self.scorer.scores

    def start(self, index: int, session_id: str, admitted: Admitted) -> Choice:
        """A choice that begins with the prompt, and scores it unless that is done."""
        scorer = None if self.scorer is None or self.scorer.is_complete else self.scorer
        session = self.create_session(session_id, admitted, self.request.choices[index], scorer)
        return self._choice(index, self._begin(session), scorer)

    def continue_from(self, leader: Choice, index: int, session_id: str, admitted: Admitted) -> Choice:
        """A choice that goes on where `leader` stands, or begins with the prompt where that has not come far."""
        source = leader.generation.session
        if not source.passed or source.reencodes or not _follow(leader.generation, session_id):
            return self.start(index, session_id, admitted)
        generation = self._begin(fork_session(source, session_id, self.request.choices[index]))
        self._fork_on_nodes(source, generation)
        return self._choice(index, generation, None)

    def _begin(self, session: Session) -> Generation:
        generation = self.lifecycle.begin(session, request_id=self.request.request_id)
        generation.figures.queued_s = self.queued_s
        return generation

    def _choice(self, index: int, generation: Generation, scorer: PromptScorer | None) -> Choice:
        return Choice(index, generation, self.request, self.encode_text, scorer=scorer)

    def _fork_on_nodes(self, source: Session, generation: Generation) -> None:
        """Ask every node that keeps the source for a copy. Where none comes of it, the copy is replayed."""
        copy, mesh = generation.session, generation.mesh
        for index, hop in enumerate(copy.hops):
            link = mesh.link(hop.node)
            if hop.mode == "stateless" or link is None or link.info is None or FORK not in link.info.features:
                continue
            generation.visited[hop.node] = None
            sampling = copy.sampling if copy.is_last(index) else None
            fork = Fork(
                session=source.id,
                target=copy.id,
                past_len=hop.held_len,
                epoch=copy.epoch,
                layers=hop.layers,
                model=copy.model,
                sampling=sampling,
            )
            mesh.fork(hop.node, fork)


def _follow(leader: Generation, session_id: str) -> bool:
    """Give a choice its places where its leader is now, which may have moved since both were admitted.

    Returns:
        False where there is no room; its own places are then as they were.
    """
    admission, hops = leader.admission, leader.session.hops
    if {hop.node for hop in hops} == admission.places(session_id):
        return True
    links = [leader.mesh.link(hop.node) for hop in hops]
    nodes = [link.info for link in links if link is not None and link.info is not None]
    tokens = admission.tokens(session_id)
    if len(nodes) < len(hops) or not all(admission.has_room(node, session_id, tokens) for node in nodes):
        return False
    admission.reroute(session_id, nodes)
    leader.mesh.announce()  # others may have the places that it has left
    return True
