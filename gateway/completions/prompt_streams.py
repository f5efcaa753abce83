"""The generations of one call's prompts as one stream of tokens.

Choices are numbered prompt by prompt: choice `j` of prompt `i` is ``i * choices_per_prompt + j``. A few prompts
are generated at the same time, each in a task of its own, because a generation must be left where it was entered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from gateway.bounded_tasks import run_bounded
from gateway.generation_request import GenerationRequest, PromptScores, Token
from gateway.state import TokenSource
from gateway.token_feed import TokenStream

PROMPTS_AT_ONCE = 4
"""Of one call: nodes batch what runs at the same time, and other callers need places too."""
TOKENS_WAITING_MAX = 16
"""Between the generations and the one reader, which keeps tokens of its own ready."""


class PromptStreams:
    """A `gateway.token_feed.TokenStream` over several prompts. `running` may be entered once.

    Args:
        source: What generates.
        requests: One for each prompt, all with as many choices; none where nothing is to be generated or scored.
    """

    def __init__(self, source: TokenSource, requests: Sequence[GenerationRequest]) -> None:
        self._source = source
        self._requests = requests
        self._choices_per_prompt = len(requests[0].choices) if requests else 0
        self._streams: dict[int, TokenStream] = {}
        self._tokens: asyncio.Queue[Token | None] = asyncio.Queue(TOKENS_WAITING_MAX)
        self._failure: Exception | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[PromptStreams]:
        """Generate while this is entered; leaving ends all work.

        Raises:
            MeshError: On leaving, where a generation failed and so ended the stream.
        """
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(self._run())
            try:
                yield self
            finally:
                work.cancel()
        if self._failure is not None:
            raise self._failure

    def scores(self, prompt: int) -> PromptScores:
        """A scored prompt; complete before the first of its tokens comes, and at the latest at the end."""
        stream = self._streams.get(prompt)
        return PromptScores() if stream is None else stream.prompt_scores

    @property
    def prompt_scores(self) -> PromptScores:
        """Those of the first prompt; `scores` has each prompt's."""
        return self.scores(0)

    def finish(self, choice: int) -> None:
        """No more of this choice, of which a token has come, is wanted."""
        prompt, own_choice = divmod(choice, self._choices_per_prompt)
        self._streams[prompt].finish(own_choice)

    async def __aiter__(self) -> AsyncIterator[Token]:
        """The tokens of all prompts as they come, until all have ended or one has failed."""
        while (token := await self._tokens.get()) is not None:
            yield token

    async def _run(self) -> None:
        try:
            jobs = [partial(self._generate, prompt) for prompt in range(len(self._requests))]
            await run_bounded(jobs, at_once=min(PROMPTS_AT_ONCE, len(jobs)))
        except Exception as error:  # noqa: BLE001 - the outermost frame of this task; `running` raises it
            self._failure = error
        await self._tokens.put(None)

    async def _generate(self, prompt: int) -> None:
        first = prompt * self._choices_per_prompt
        async with self._source.generation(self._requests[prompt]) as stream:
            self._streams[prompt] = stream
            async for token in stream:
                await self._tokens.put(Token(token.id, first + token.choice, token.logprobs))
