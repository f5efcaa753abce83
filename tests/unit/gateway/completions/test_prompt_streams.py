"""Several prompts as one stream: numbering, bounds, scores, and an end that leaves nothing running."""

from __future__ import annotations

import asyncio

import pytest

from gateway.completions.prompt_streams import PROMPTS_AT_ONCE, PromptStreams
from gateway.generation_request import GenerationRequest, PromptScores, Token, TokenLogprobs
from gateway.token_feed import TokenFeed
from shared.errors import MeshError
from shared.messages import SamplingParams
from tests.support.scripted_generator import FOR_EVER, ScriptedGenerator


def requests(prompts: int, *, choices: int = 1, prompt_logprobs: int | None = None) -> list[GenerationRequest]:
    """Prompt `i` is the id `i`."""
    return [
        GenerationRequest(
            prompt_ids=(prompt,),
            choices=(SamplingParams(),) * choices,
            max_tokens=3,
            eos_ids=frozenset(),
            request_id="req_1",
            prompt_logprobs=prompt_logprobs,
        )
        for prompt in range(prompts)
    ]


async def read(streams: PromptStreams) -> list[Token]:
    """All tokens."""
    async with streams.running() as running:
        return [token async for token in running]


async def test_choices_are_numbered_prompt_by_prompt():
    """Choice j of prompt i is i * n + j."""
    generator = ScriptedGenerator(
        script=lambda request: [
            Token(10 * request.prompt_ids[0] + choice, choice) for choice in (0, 1) for _ in range(3)
        ]
    )
    tokens = await read(PromptStreams(generator, requests(3, choices=2)))
    by_choice = {choice: [token.id for token in tokens if token.choice == choice] for choice in range(6)}
    assert by_choice == {0: [0] * 3, 1: [1] * 3, 2: [10] * 3, 3: [11] * 3, 4: [20] * 3, 5: [21] * 3}


async def test_never_more_than_a_few_prompts_at_once():
    """And all of them, in the end."""
    generator = ScriptedGenerator(script=lambda _request: [7, 7, 7])
    tokens = await read(PromptStreams(generator, requests(3 * PROMPTS_AT_ONCE)))
    assert len(tokens) == 9 * PROMPTS_AT_ONCE
    assert generator.active_max == PROMPTS_AT_ONCE
    assert [request.prompt_ids[0] for request in generator.requests] == list(range(3 * PROMPTS_AT_ONCE))


async def test_a_finished_choice_is_finished_in_its_own_generation():
    """Under the number that it has there."""
    generator = ScriptedGenerator(script=lambda _request: [Token(1, 0), Token(2, 1), Token(2, 1)])
    streams = PromptStreams(generator, requests(2, choices=2))
    async with streams.running() as running:
        async for token in running:
            if token.choice == 3:
                running.finish(3)
    by_prompt = {stream._request.prompt_ids[0]: stream.finished for stream in generator.streams}
    assert set(by_prompt[1]) == {1}
    assert by_prompt[0] == []


async def test_each_prompt_has_its_scores():
    """Also once all is over."""
    generator = ScriptedGenerator(
        script=lambda _request: [1],
        scores=lambda request: PromptScores([TokenLogprobs(-float(request.prompt_ids[0]))]),
    )
    streams = PromptStreams(generator, requests(2, prompt_logprobs=0))
    assert streams.scores(1).tokens == []
    await read(streams)
    assert [streams.scores(prompt).tokens for prompt in (0, 1)] == [[TokenLogprobs(-0.0)], [TokenLogprobs(-1.0)]]
    assert streams.prompt_scores is streams.scores(0)


async def test_nothing_to_generate_ends_at_once():
    """No request, no token, no generation."""
    assert await read(PromptStreams(ScriptedGenerator(), [])) == []


async def test_a_failure_comes_after_the_tokens_before_it_and_ends_the_other_prompts():
    """As it is, on leaving."""
    failure = MeshError("node_lost", "gone")
    generator = ScriptedGenerator(script=lambda request: [5, failure] if request.prompt_ids == (0,) else [FOR_EVER()])
    streams = PromptStreams(generator, requests(2))
    tokens = []
    with pytest.raises(MeshError) as caught:
        async with streams.running() as running:
            tokens += [token async for token in running]
    assert caught.value is failure
    assert [token.id for token in tokens] == [5]
    assert generator.active == 0
    assert sorted(generator.ends) == ["MeshError", "cancelled"]


async def test_a_reader_that_is_cancelled_leaves_nothing_running():
    """Whether it waits for tokens or has too many of them."""
    for script in ([FOR_EVER()], [1] * 3):
        generator = ScriptedGenerator(script=lambda _request, script=script: script)
        feed = TokenFeed(PromptStreams(generator, requests(40)).running(), tokens_max=2)
        running = asyncio.create_task(feed.run())
        for _ in range(20):
            await asyncio.sleep(0)
        assert generator.active > 0
        running.cancel()
        await asyncio.wait([running])
        assert generator.active == 0
