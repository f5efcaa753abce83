"""From a request to its tokens: wait for a place, give out tokens, leave no trace on any node."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from gateway.admission import Admission, Admitted, Demand
from gateway.errors import AdmissionRefused, GenerationFailed, NotReady
from gateway.generation_request import GenerationRequest, PromptScores, Token
from gateway.journal import Journal
from gateway.mesh import Mesh
from gateway.passes import EncodeText, next_ids
from gateway.registry import NoRoute, find_route
from gateway.relay import Figures, Generation
from gateway.session import create_session
from gateway.waiting import wait_first
from shared.clock import Clock, SystemClock
from shared.messages import Cancel, Release

SESSION_ID_BYTES = 12
"""96 random bits: unique across gateways, and 16 characters in every step's header."""

log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """Bounds of all generations of a gateway.

    Args:
        prefill_chunk_tokens: The most positions that enter a hop with one step.
        failover_timeout_s: How long a hop may be without any node before its generation ends.
        route_wait_s: How long a new request waits for a route that is not complete.
        queue_max: How many generations wait for a place; more are refused.
        queue_timeout_s: How long one waits for a place.
        journal_bytes_max: Budget of all journals together.
    """

    prefill_chunk_tokens: int = 256
    failover_timeout_s: float = 30.0
    route_wait_s: float = 5.0
    queue_max: int = 64
    queue_timeout_s: float = 120.0
    journal_bytes_max: int = 1 << 30


class TokenStream:
    """The tokens of one generation, computed as they are asked for. Made by `Generator.generation`.

    One task at a time may ask. A failure or a cancellation while a token is awaited ends the stream.

    Args:
        generation: Whose tokens.
        request: How many, and which end it.
        encode_text: For a last hop that answers with text.
    """

    def __init__(self, generation: Generation, request: GenerationRequest, encode_text: EncodeText) -> None:
        self._generation = generation
        self._eos_ids = request.eos_ids
        self._left = request.max_tokens
        self._encode_text = encode_text
        self._ready: deque[int] = deque()
        self._has_failed = False
        self._is_broken = False

    @property
    def figures(self) -> Figures:
        """What the generation did so far."""
        return self._generation.figures

    @property
    def is_complete(self) -> bool:
        """Whether the last token has been given out: an end of sequence, or the last one asked for."""
        return self._left == 0

    @property
    def has_failed(self) -> bool:
        """Whether the mesh could not go on."""
        return self._has_failed

    @property
    def prompt_scores(self) -> PromptScores:
        """The scored prompt."""
        return PromptScores()

    def finish(self, _choice: int) -> None:
        """No more tokens are wanted."""
        self._left = 0

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Token:
        """The next token.

        Raises:
            GenerationFailed: The generation cannot go on.
            StopAsyncIteration: The answer is complete, or the stream has ended before.
        """
        if self._left == 0 or self._is_broken:
            raise StopAsyncIteration
        if not self._ready:
            await self._extend()
        token_id = self._ready.popleft()
        self._left = 0 if token_id in self._eos_ids else self._left - 1
        return Token(token_id)

    async def _extend(self) -> None:
        self._is_broken = True  # until there is an answer: a pass that was left half-way cannot be taken up
        try:
            self._ready.extend(await next_ids(self._generation, self._encode_text))
        except GenerationFailed:
            self._has_failed = True
            raise
        self._is_broken = False


@dataclass(slots=True)
class Totals:
    """What a gateway did since its start.

    Args:
        outcomes: Generations `started`, of these `completed`, `cancelled` (left early) and `failed`; and `refused`.
        passes: And the following: as in `Figures`, of generations that have ended.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    passes: int = 0
    misses: int = 0
    replays: int = 0
    full_replays: int = 0
    moves: int = 0

    def add(self, figures: Figures) -> None:
        """Take in a generation that has ended."""
        self.passes += figures.passes
        self.misses += figures.misses.total()
        self.replays += figures.replays
        self.full_replays += figures.full_replays
        self.moves += figures.moves


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
        totals: What was done so far.
    """

    mesh: Mesh
    admission: Admission
    journal: Journal
    settings: GenerationSettings
    encode_text: EncodeText
    clock: Clock
    mint_session_id: Callable[[], str]
    totals: Totals = field(default_factory=Totals)
    _turns: dict[str, asyncio.Future[Admitted]] = field(default_factory=dict, init=False)
    _running: dict[str, Generation] = field(default_factory=dict, init=False)

    @asynccontextmanager
    async def generation(self, request: GenerationRequest) -> AsyncIterator[TokenStream]:
        """Wait for a place on the mesh, give out tokens, and free the session on every node on the way out.

        Leaving after the last token releases the session; leaving earlier, for whatever reason, cancels
        what is being computed for it. Neither waits.

        Raises:
            NotReady: There is no route.
            AdmissionRefused: There is no room.
        """
        session_id = self.mint_session_id()
        queued_at = self.clock.monotonic()
        admitted_at = queued_at
        try:
            admitted = await self._turn(_demand(session_id, request))
            admitted_at = self.clock.monotonic()
            generation = self._begin(admitted, request)
            generation.figures.queued_s = admitted_at - queued_at
            stream = TokenStream(generation, request, self.encode_text)
            try:
                yield stream
            finally:
                self._end(generation, stream, request_id=request.request_id)
        finally:
            self._leave(session_id, lasted_s=self.clock.monotonic() - admitted_at)

    def running_figures(self) -> list[Figures]:
        """What the generations under way did so far."""
        return [generation.figures for generation in self._running.values()]

    def missing_route(self) -> str | None:
        """Why no route exists; None when one does."""
        admission = self.admission
        route = find_route(self.mesh.nodes(), model=admission.model, num_layers=admission.num_layers)
        return route.reason if isinstance(route, NoRoute) else None

    def admit(self) -> None:
        """Let those start whose turn it is; called whenever a place may have become free."""
        for admitted in self.admission.admit(self.mesh.nodes()):
            self._turns.pop(admitted.session).set_result(admitted)

    async def _turn(self, demand: Demand) -> Admitted:
        turn: asyncio.Future[Admitted] = asyncio.get_running_loop().create_future()
        try:
            self.admission.enqueue(demand, self.mesh.nodes())
            self._turns[demand.session] = turn
            self.admit()
            if not turn.done():
                log.info("generation.queued", session=demand.session, queued=self.admission.queued)
                await self._wait_turn(turn)
        except (AdmissionRefused, NotReady):
            self.totals.outcomes["refused"] += 1
            raise
        return turn.result()

    async def _wait_turn(self, turn: asyncio.Future[Admitted]) -> None:
        started_at = self.clock.monotonic()
        route_seen_at = started_at
        while not turn.done():
            changed = self.mesh.changed
            now = self.clock.monotonic()
            missing = self.missing_route()
            if missing is None:
                route_seen_at = now
                left_s = started_at + self.settings.queue_timeout_s - now
            else:
                left_s = route_seen_at + self.settings.route_wait_s - now
            if left_s <= 0 and missing is not None:
                raise NotReady("no_route", missing)
            if left_s <= 0:
                retry_after_s = self.admission.retry_after_s()
                raise AdmissionRefused(
                    "queue_timeout",
                    f"no place became free within {now - started_at:.0f} s",
                    retry_after_s=retry_after_s,
                )
            await wait_first(self.clock, left_s, turn, changed.wait())

    def _begin(self, admitted: Admitted, request: GenerationRequest) -> Generation:
        session = create_session(
            admitted.session,
            route=admitted.route,
            nodes=admitted.nodes,
            prompt_ids=request.prompt_ids,
            sampling=request.choices[0],
            model=self.admission.model,
            chunk_tokens=self.settings.prefill_chunk_tokens,
            journal=self.journal,
        )
        generation = Generation(session, self.mesh, self.admission, self.clock, self.settings.failover_timeout_s)
        self._running[session.id] = generation
        self.totals.outcomes["started"] += 1
        log.debug(
            "generation.started",
            session=session.id,
            request_id=request.request_id,
            route=[f"{hop.node}[{hop.layers}]" for hop in admitted.route.hops],
        )
        return generation

    def _end(self, generation: Generation, stream: TokenStream, *, request_id: str) -> None:
        session, figures = generation.session, generation.figures
        message = Release(session=session.id) if stream.is_complete else Cancel(session=session.id)
        for node in generation.visited:
            self.mesh.post(node, message)
        session.close()
        del self._running[session.id]
        outcome = "completed" if stream.is_complete else "failed" if stream.has_failed else "cancelled"
        self.totals.outcomes[outcome] += 1
        self.totals.add(figures)
        log.debug(
            "generation.ended",
            session=session.id,
            request_id=request_id,
            outcome=outcome,
            passes=figures.passes,
            misses=dict(figures.misses),
            replays=figures.replays,
        )

    def _leave(self, session_id: str, *, lasted_s: float) -> None:
        self._turns.pop(session_id, None)
        self.admission.withdraw(session_id)
        self.admission.release(session_id, lasted_s=lasted_s)
        self.mesh.announce()


def _demand(session_id: str, request: GenerationRequest) -> Demand:
    prompt_tokens = len(request.prompt_ids)
    return Demand(session_id, prompt_tokens + request.max_tokens, tokens_min=prompt_tokens + 1)


def create_generator(
    mesh: Mesh,
    *,
    model: str,
    num_layers: int,
    encode_text: EncodeText,
    settings: GenerationSettings | None = None,
    clock: Clock | None = None,
    mint_session_id: Callable[[], str] | None = None,
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
    """
    settings = settings or GenerationSettings()
    generator = Generator(
        mesh=mesh,
        admission=Admission(model=model, num_layers=num_layers, queue_max=settings.queue_max),
        journal=Journal(settings.journal_bytes_max),
        settings=settings,
        encode_text=encode_text,
        clock=clock or SystemClock(),
        mint_session_id=mint_session_id or (lambda: secrets.token_urlsafe(SESSION_ID_BYTES)),
    )
    mesh.listen(generator.admit)
    return generator


__all__ = [
    "EncodeText",
    "GenerationRequest",
    "GenerationSettings",
    "Generator",
    "TokenStream",
    "create_generator",
]
