"""Several prompts, and several inputs to embed, on the real generator over scripted nodes."""

from __future__ import annotations

from array import array

import pytest

from gateway.completions.prompt_streams import PromptStreams
from gateway.embeddings.embed import embed_all
from gateway.embeddings.schema import read_embeddings_request
from gateway.generation_request import GenerationRequest, PromptScores, Token
from tests.support.fake_model import expected_embedding, expected_scores
from tests.support.memory_mesh import NUM_LAYERS, ScriptedMesh, expected, idle, scripted_mesh, seeded

PROMPTS = [tuple(range(100 + start, 103 + 2 * start)) for start in range(7)]
CHOICES = seeded(1, 2)


def requests(mesh: ScriptedMesh, *, max_tokens: int = 4) -> list[GenerationRequest]:
    """Two choices of each prompt, scored."""
    return [mesh.request(max_tokens, prompt_ids=prompt, choices=CHOICES, prompt_logprobs=1) for prompt in PROMPTS]


@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_every_prompt_is_scored_and_continued(max_tokens: int):
    """As each would be alone."""
    async with scripted_mesh() as mesh:
        streams = PromptStreams(mesh.generator, requests(mesh, max_tokens=max_tokens))

        async def read() -> list[Token]:
            async with streams.running() as running:
                return [token async for token in running]

        tokens = await mesh.drive(read())
        await idle()
        for index, prompt in enumerate(PROMPTS):
            assert streams.scores(index) == PromptScores(expected_scores(prompt, 1, num_layers=NUM_LAYERS))
            for choice, sampling in enumerate(CHOICES):
                found = [token.id for token in tokens if token.choice == 2 * index + choice]
                assert found == expected(max_tokens, prompt_ids=prompt, sampling=sampling)
        mesh.assert_nothing_left()


async def test_a_reader_that_leaves_in_the_middle_leaves_nothing_on_any_node():
    """Of the prompts under way and of those that waited."""
    async with scripted_mesh() as mesh:
        streams = PromptStreams(mesh.generator, requests(mesh))

        async def read_one() -> None:
            async with streams.running() as running:
                async for _ in running:
                    return

        await mesh.drive(read_one())
        await idle()
        mesh.assert_nothing_left()
        assert mesh.generator.totals.outcomes["started"] < 2 * len(PROMPTS)


async def test_every_input_has_its_own_vector():
    """However they are pooled and interleaved."""
    asked = read_embeddings_request(b'{"model": "m", "input": "a", "normalize": false}')
    async with scripted_mesh() as mesh:
        vectors = await mesh.drive(embed_all(mesh.generator, PROMPTS, asked, request_id="r"))
        await idle()
        assert vectors == [array("f", expected_embedding(ids, "mean", num_layers=NUM_LAYERS)) for ids in PROMPTS]
        mesh.assert_nothing_left()
