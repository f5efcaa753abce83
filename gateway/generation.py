"""From a request to its tokens: wait for a place, give out tokens, leave no trace on any node."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gateway.admission import Admission, Admitted, Demand
from gateway.admission_queue import AdmissionQueue
from gateway.choice import ChoiceStream
from gateway.choice_maker import ChoiceMaker
from gateway.embedding import EmbeddingPool
from gateway.errors import AdmissionRefused, GenerationFailed, NotReady
from gateway.figures import Figures, Totals
from gateway.generation_request import GenerationRequest
from gateway.generation_settings import GenerationSettings
from gateway.journal import Journal
from gateway.lifecycle import Lifecycle, Outcome
from gateway.many_choices import ManyChoices
from gateway.mesh import Mesh
from gateway.needs import needs_of
from gateway.one_choice import OneChoice
from gateway.passes import EncodeText, prefill
from gateway.probe import Probe
from gateway.prompt_scores import PromptScorer
from gateway.registry import longest_context
from gateway.session import Session, create_session
from shared.clock import Clock, SystemClock
from shared.messages import Pooling, SamplingParams

SESSION_ID_BYTES = 12
"""96 random bits: unique across gateways, and 16 characters in every step's header."""


@dataclass(slots=True, kw_only=True)
class Generator:
    """Runs generations over a mesh. Made by `create_generator`.

    Args:
        mesh: The nodes; someone else runs it.
        admission: Decides who may start.
        journal: Keeps what hops were given.
        settings: Bounds.
        encode_text: For a last hop that answers with text.
        clock: Time.
        mint_session_id: Gives ids that are unique across gateways.
        queue: Where requests wait for their places.
        lifecycle: The generations under way.
        vocab_size: Entries of the model's vocabulary; None where that is not known.
    """

    mesh: Mesh
    admission: Admission
    journal: Journal
    settings: GenerationSettings
    encode_text: EncodeText
    clock: Clock
    mint_session_id: Callable[[], str]
    queue: AdmissionQueue
    lifecycle: Lifecycle
    vocab_size: int | None = None

    @property
    def totals(self) -> Totals:
        """What was done so far."""
        return self.lifecycle.totals

    @asynccontextmanager
    async def generation(self, request: GenerationRequest) -> AsyncIterator[ChoiceStream]:
        """Wait for a place on the mesh, give out tokens, and free the sessions on every node on the way out.

        Leaving after the last token releases the sessions; leaving earlier, for whatever reason, cancels
        what is being computed for them. Neither waits for a node.

        Raises:
            NotReady: There is no route.
            AdmissionRefused: There is no room, or no node does what is asked for.
        """
        async with self._admitted(self._demand(request)) as (admitted, queued_s):
            maker = self._maker(request, queued_s)
            if len(admitted.demand.sessions) == 1:
                choice = maker.start(0, admitted.sessions[0], admitted)
                try:
                    yield OneChoice(choice, maker.prompt_scores)
                finally:
                    self.lifecycle.end(choice.generation, choice.outcome)
            else:
                stream = ManyChoices(admitted, maker, self.queue, self.lifecycle)
                try:
                    yield stream
                finally:
                    await stream.close()

    async def embed(self, prompt_ids: tuple[int, ...], pooling: Pooling, request_id: str) -> tuple[float, ...]:
        """The model's last hidden states of these tokens, after its final norm, pooled into one vector of f32 values.

        Args:
            prompt_ids: At least one id.
            pooling: `mean` of all positions, or the `last` one's.
            request_id: For logs.

        Raises:
            NotReady: There is no route.
            AdmissionRefused: There is no room, or no node does this.
            GenerationFailed: It had begun and cannot go on.
        """
        length = len(prompt_ids)
        if not length:
            raise ValueError("an embedding needs at least one token")
        needs = needs_of((), context_len=length, features=("embed",))
        demand = Demand(sessions=(self.mint_session_id(),), tokens=length, tokens_min=length, needs=needs)
        pool = EmbeddingPool(length, pooling)
        async with self._admitted(demand) as (admitted, queued_s):
            session = self._session(admitted.sessions[0], admitted, prompt_ids, SamplingParams(), pool, draws=False)
            generation = self.lifecycle.begin(session, request_id=request_id)
            generation.figures.queued_s = queued_s
            outcome: Outcome = "cancelled"
            try:
                await prefill(generation, length)
                outcome = "completed"
            except GenerationFailed:
                outcome = "failed"
                raise
            finally:
                self.lifecycle.end(generation, outcome)
        return pool.vector()

    def running_figures(self) -> list[Figures]:
        """What the generations under way did so far."""
        return [generation.figures for generation in self.lifecycle.running.values()]

    def missing_route(self) -> str | None:
        """Why no route exists; None when one does."""
        return self.queue.missing_route()

    def context_len(self) -> int:
        """Positions, prompt and answer together, that some route takes at most; 0 when that is not known."""
        admission = self.admission
        return longest_context(self.mesh.nodes(), model=admission.model, num_layers=admission.num_layers)

    @asynccontextmanager
    async def _admitted(self, demand: Demand) -> AsyncIterator[tuple[Admitted, float]]:
        """Wait for the places, and give back on the way out what nobody has given back before."""
        queued_at = self.clock.monotonic()
        try:
            try:
                admitted = await self.queue.take(demand)
            except (AdmissionRefused, NotReady):
                self.totals.outcomes["refused"] += 1
                raise
            yield admitted, self.clock.monotonic() - queued_at
        finally:
            self.lifecycle.leave(demand.sessions)

    def _demand(self, request: GenerationRequest) -> Demand:
        prompt_tokens = len(request.prompt_ids)
        tokens = prompt_tokens + request.max_tokens
        choices = request.choices if request.max_tokens else request.choices[:1]
        scores = request.prompt_logprobs is not None
        return Demand(
            sessions=tuple(self.mint_session_id() for _ in choices),
            tokens=tokens,
            tokens_min=min(tokens, prompt_tokens + 1),
            needs=needs_of(choices, context_len=tokens, features=("score",) if scores else ()),
            priority=request.priority,
        )

    def _maker(self, request: GenerationRequest, queued_s: float) -> ChoiceMaker:
        def create(
            session_id: str, admitted: Admitted, sampling: SamplingParams, scorer: PromptScorer | None
        ) -> Session:
            return self._session(session_id, admitted, request.prompt_ids, sampling, scorer)

        top = request.prompt_logprobs
        return ChoiceMaker(
            request=request,
            create_session=create,
            lifecycle=self.lifecycle,
            encode_text=self.encode_text,
            scorer=None if top is None else PromptScorer(request.prompt_ids, top, self.vocab_size),
            queued_s=queued_s,
        )

    def _session(
        self,
        session_id: str,
        admitted: Admitted,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        probe: Probe | None,
        *,
        draws: bool = True,
    ) -> Session:
        return create_session(
            session_id,
            route=admitted.route,
            nodes=admitted.nodes,
            prompt_ids=prompt_ids,
            sampling=sampling,
            model=self.admission.model,
            chunk_tokens=self.settings.prefill_chunk_tokens,
            journal=self.journal,
            needs=admitted.demand.needs,
            probe=probe,
            draws=draws,
            vocab_size=self.vocab_size,
        )


def create_generator(
    mesh: Mesh,
    *,
    model: str,
    num_layers: int,
    encode_text: EncodeText,
    settings: GenerationSettings | None = None,
    clock: Clock | None = None,
    mint_session_id: Callable[[], str] | None = None,
    vocab_size: int | None = None,
) -> Generator:
    """A generator over a mesh, which tells it of changes from now on.

    Args:
        mesh: The nodes.
        model: The model's fingerprint.
        num_layers: How many decoder layers it has.
        encode_text: Token ids of a text, special tokens read as such and none added.
        settings: Bounds; the defaults when absent.
        clock: Time.
        mint_session_id: Unique ids; random ones when absent.
        vocab_size: Entries of the model's vocabulary, beyond which no node's token is taken; None where that is
            not known.
    """
    settings = settings or GenerationSettings()
    clock = clock or SystemClock()
    admission = Admission(model=model, num_layers=num_layers, queue_max=settings.queue_max, granted=mesh.granted)
    mesh.demand = admission.demand
    journal = Journal(settings.journal_bytes_max)
    queue = AdmissionQueue(mesh=mesh, admission=admission, settings=settings, clock=clock)
    mesh.listen(queue.admit)
    return Generator(
        mesh=mesh,
        admission=admission,
        journal=journal,
        settings=settings,
        encode_text=encode_text,
        clock=clock,
        mint_session_id=mint_session_id or (lambda: secrets.token_urlsafe(SESSION_ID_BYTES)),
        queue=queue,
        lifecycle=Lifecycle(
            mesh=mesh, admission=admission, journal=journal, clock=clock, failover_timeout_s=settings.failover_timeout_s
        ),
        vocab_size=vocab_size,
    )


__all__ = [
    "EncodeText",
    "GenerationRequest",
    "GenerationSettings",
    "Generator",
    "create_generator",
]
