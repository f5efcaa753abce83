"""The stream of a request with several choices, which share one prefill of the prompt.

Theory of operation. The prompt goes over the route once, all but its last position, in the session of the first
choice; that session is then forked for each other choice, at every node and in every journal, and each choice decodes
the last position itself, drawing in its own way. A node that makes no copies, or could not, answers the copy's first
decode with a miss, and the ordinary replay does the work.

When the mesh cannot hold all choices at once they run in *waves*: as many as an empty mesh could hold are admitted
together, or none, so that no two requests wait for each other's places. What is left then waits before all requests
that have not begun, and prefills anew. One task conducts the waves, each choice is a task below it, and the reader
takes from their lanes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from gateway.admission import Admitted
from gateway.admission_queue import AdmissionQueue
from gateway.choice import Choice
from gateway.choice_lanes import ChoiceLanes
from gateway.choice_maker import ChoiceMaker
from gateway.errors import AdmissionRefused, GenerationFailed, NotReady
from gateway.figures import Figures, merge_figures
from gateway.generation_request import PromptScores, Token
from gateway.lifecycle import Lifecycle


class ManyChoices:
    """A `gateway.choice.ChoiceStream`. Its work begins at once; `close` ends it, and must be called.

    Args:
        wave: What was admitted first.
        maker: Makes the choices.
        queue: Where later waves wait.
        lifecycle: Ends generations.
    """

    def __init__(self, wave: Admitted, maker: ChoiceMaker, queue: AdmissionQueue, lifecycle: Lifecycle) -> None:
        self._maker = maker
        self._queue = queue
        self._lifecycle = lifecycle
        self._count = len(wave.demand.sessions)
        self._lanes = ChoiceLanes(self._count)
        self._choices: dict[int, Choice] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended: set[int] = set()
        self._failure: Exception | None = None
        self._is_over = False
        self._conductor = asyncio.create_task(self._conduct(wave))

    @property
    def figures(self) -> Figures:
        """What was done so far."""
        return merge_figures(choice.generation.figures for choice in self._choices.values())

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended and its last token has been given out."""
        return len(self._ended) == self._count and self._lanes.is_empty

    @property
    def prompt_scores(self) -> PromptScores:
        """The scored prompt; empty where it was not asked for."""
        return self._maker.prompt_scores

    def finish(self, choice: int) -> None:
        """End one choice, and release its session.

        Raises:
            ValueError: There is no such choice.
        """
        if not 0 <= choice < self._count:
            raise ValueError(f"there is no choice {choice}, only 0 to {self._count - 1}")
        self._ended.add(choice)
        self._lanes.close(choice)
        made, task = self._choices.get(choice), self._tasks.get(choice)
        if made is not None:
            made.finish()
        if made is not None and task is not None:  # else its wave is still to begin, and leaves it out
            task.cancel()
            self._lifecycle.end(made.generation, made.outcome)

    def __aiter__(self) -> ManyChoices:
        return self

    async def __anext__(self) -> Token:
        """The next token of any choice.

        Raises:
            GenerationFailed: One of the choices cannot go on, and with it the request.
            StopAsyncIteration: Every choice has ended, or the request has failed before.
        """
        while True:
            token = self._lanes.take()
            if token is not None:
                return token
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self._is_over or len(self._ended) == self._count:
                raise StopAsyncIteration
            await self._lanes.change()

    async def close(self) -> None:
        """End everything that has not ended, on every node, and wait for the tasks here to be gone."""
        for task in (self._conductor, *self._tasks.values()):
            task.cancel()
        self._end_all()
        await asyncio.gather(self._conductor, return_exceptions=True)

    def _end_all(self) -> None:
        for choice in self._choices.values():
            self._lifecycle.end(choice.generation, choice.outcome)

    async def _conduct(self, wave: Admitted) -> None:
        try:
            await self._run_waves(wave)
        except Exception as error:  # noqa: BLE001 - the outermost frame of this task; the reader raises it
            self._failure = error
        finally:
            self._end_all()
            self._is_over = True
            self._lanes.wake()

    async def _run_waves(self, wave: Admitted) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                first = 0
                while True:
                    await self._begin_wave(wave, first, tasks)
                    first += len(wave.sessions)
                    if first == self._count:
                        return
                    wave = await self._next_wave(wave)
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _next_wave(self, wave: Admitted) -> Admitted:
        demand = replace(wave.demand, sessions=wave.demand.sessions[len(wave.sessions) :], resumes=True)
        try:
            return await self._queue.take(demand)
        except (AdmissionRefused, NotReady) as error:
            raise GenerationFailed(error.code, error.message) from error

    async def _begin_wave(self, wave: Admitted, first: int, tasks: asyncio.TaskGroup) -> None:
        wanted = self._wanted(enumerate(wave.sessions, first))
        if not wanted:
            return
        (index, session_id), *others = wanted
        leader = self._choices[index] = self._maker.start(index, session_id, wave)
        if others and not leader.generation.session.reencodes:
            await leader.prime()
        for other, other_id in self._wanted(others):
            choice = self._choices[other] = self._maker.continue_from(leader, other, other_id, wave)
            self._tasks[other] = tasks.create_task(self._run_choice(choice))
        self._tasks[index] = tasks.create_task(self._run_choice(leader))

    def _wanted(self, sessions: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
        """Those of a wave that have not been finished before they began; the others' places are given back."""
        wanted: list[tuple[int, str]] = []
        for index, session_id in sessions:
            if index in self._ended:
                self._lifecycle.leave((session_id,))
            else:
                wanted.append((index, session_id))
        return wanted

    async def _run_choice(self, choice: Choice) -> None:
        while (token := await choice.next()) is not None:
            if choice.is_complete:
                self._lifecycle.end(choice.generation, choice.outcome)
            await self._lanes.put(token)
        self._lifecycle.end(choice.generation, choice.outcome)
        self._ended.add(choice.index)
        self._lanes.wake()
