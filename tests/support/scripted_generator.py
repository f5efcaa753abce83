"""A generator that answers from a script, for tests of the HTTP side without nodes.

`ScriptedGenerator.script` decides what each generation does: token ids are yielded, exceptions raised, events
waited for. Everything that a test asks about (who is running, what was requested, how each
generation ended) is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from gateway.generation_request import GenerationRequest, PromptScores, Token

Step = int | Token | Exception | asyncio.Event
"""A token id or a whole token to yield, an exception to raise, or an event to wait for."""
Script = Callable[[GenerationRequest], Iterable[Step]]

FOR_EVER = asyncio.Event
"""`FOR_EVER()` in a script is an event that nobody sets."""


@dataclass
class ScriptedGenerator:
    """Implements `gateway.state.TokenSource`.

    Args:
        script: Steps after admission, for each request.
        admission: Steps before admission: exceptions and events.
        scores: The scored prompt of a request that asks for one.
        embedding: What `embed` gives for a prompt's ids and a pooling.
        embeds: What was embedded, in the order in which it began.
        active_max: The most that were active at once.
    """

    script: Script = lambda _request: ()
    admission: list[Step] = field(default_factory=list)
    requests: list[GenerationRequest] = field(default_factory=list)
    active: int = 0
    yielded: int = 0
    ends: list[str] = field(default_factory=list)
    streams: list[ScriptedStream] = field(default_factory=list)
    scores: Callable[[GenerationRequest], PromptScores] = lambda _request: PromptScores()
    embedding: Callable[[tuple[int, ...], str], tuple[float, ...]] = lambda ids, _pooling: tuple(map(float, ids))
    embeds: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    active_max: int = 0

    async def embed(self, prompt_ids: tuple[int, ...], *, pooling: str, request_id: str) -> tuple[float, ...]:
        """Admit, then give the scripted vector."""
        assert request_id, "a request has an id"
        self.embeds.append((prompt_ids, pooling))
        async with self._working():
            return self.embedding(prompt_ids, pooling)

    @asynccontextmanager
    async def generation(self, request: GenerationRequest) -> AsyncIterator[ScriptedStream]:
        """Admit, then hand out the script's tokens, up to what was asked for and to the first end token."""
        self.requests.append(request)
        async with self._working():
            stream = ScriptedStream(self, request)
            self.streams.append(stream)
            yield stream

    @asynccontextmanager
    async def _working(self) -> AsyncIterator[None]:
        """Be active from before admission on, and record how it ends."""
        entering_task = asyncio.current_task()
        self.active += 1
        self.active_max = max(self.active_max, self.active)
        end = "crashed"
        try:
            for step in self.admission:
                await _perform(step)
            yield
            end = "left"
        except asyncio.CancelledError:
            end = "cancelled"
            raise
        except Exception as error:
            end = type(error).__name__
            raise
        finally:
            assert asyncio.current_task() is entering_task, "left in another task than it was entered in"
            self.active -= 1
            self.ends.append(end)


class ScriptedStream:
    """Implements `gateway.token_feed.TokenStream`: what the script says, each choice up to its end.

    Args:
        generator: Whose script.
        request: Given to it.
    """

    def __init__(self, generator: ScriptedGenerator, request: GenerationRequest) -> None:
        self._generator = generator
        self._request = request
        scored = request.prompt_logprobs is not None
        self.prompt_scores = generator.scores(request) if scored else PromptScores()
        self.finished: list[int] = []

    def finish(self, choice: int) -> None:
        """Record that the reader wants no more of a choice."""
        self.finished.append(choice)

    async def __aiter__(self) -> AsyncIterator[Token]:
        """Perform the script's steps. A plain id is of the first choice."""
        request = self._request
        left = dict.fromkeys(range(len(request.choices)), request.max_tokens)
        for step in self._generator.script(request):
            if not isinstance(step, int | Token):
                await _perform(step)
                continue
            token = step if isinstance(step, Token) else Token(step)
            if not left[token.choice] or token.choice in self.finished:
                continue
            self._generator.yielded += 1
            left[token.choice] = 0 if token.id in request.eos_ids else left[token.choice] - 1
            yield token
            if not any(count for choice, count in left.items() if choice not in self.finished):
                return


async def _perform(step: Step) -> None:
    if isinstance(step, Exception):
        raise step
    if isinstance(step, asyncio.Event):
        await step.wait()


@dataclass
class ScriptedMesh:
    """Implements `gateway.state.MeshView`."""

    missing: str | None = None
    refreshed: int = 0
    content: dict[str, Any] = field(default_factory=lambda: {"nodes": [], "links": []})

    def missing_route(self) -> str | None:
        """Why no full route exists."""
        return self.missing

    def readiness(self) -> dict[str, Any]:
        """The content of GET /readyz."""
        return {"reason": self.missing, "missing_layers": [], "nodes": []}

    async def refresh(self) -> None:
        """Count the call."""
        self.refreshed += 1

    def snapshot(self) -> dict[str, Any]:
        """The content of GET /mesh."""
        return self.content
