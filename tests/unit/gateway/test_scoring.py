"""Scored prompts: every token once, whatever happens to the nodes meanwhile."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from gateway.errors import GenerationFailed
from gateway.generation_request import PromptScores, Token
from gateway.prompt_scores import PromptScorer
from shared.errors import StepFailed
from shared.messages import Message
from shared.tensor_spec import WireTensor
from tests.support.fake_model import expected_scores
from tests.support.memory_mesh import (
    GREEDY,
    NUM_LAYERS,
    SEEDED,
    ScriptedMesh,
    expected,
    expected_tokens_of,
    idle,
    scripted_mesh,
    seeded,
)
from tests.support.scripted_node import Crash, Cut, Drop, Fail, Fate, Mangle, Miss, nth

LONG_PROMPT = tuple(range(100, 119))
REPLICAS = ("0:2", "2:4", "4:6", "0:2", "2:4", "4:6")


async def score(mesh: ScriptedMesh, top: int = 2, **fields: object) -> tuple[PromptScores, list[Token]]:
    """The scored prompt, as it is when the first token is given out, and the tokens."""

    async def collect() -> tuple[PromptScores, list[Token]]:
        values = {"prompt_ids": LONG_PROMPT, "max_tokens": 4, **fields}
        tokens: list[Token] = []
        async with mesh.generator.generation(mesh.request(prompt_logprobs=top, **values)) as stream:
            async for token in stream:
                assert None not in stream.prompt_scores.tokens[1:]
                tokens.append(token)
            return stream.prompt_scores, tokens

    result = await mesh.drive(collect())
    await idle()
    return result


def reference(prompt_ids: tuple[int, ...] = LONG_PROMPT, top: int = 2) -> PromptScores:
    """What it must be."""
    return PromptScores(expected_scores(prompt_ids, top, num_layers=NUM_LAYERS))


@pytest.mark.parametrize("prompt_len", [1, 2, 4, 5, 6, 19])
@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("cuts", [["0:6"], ["0:2", "2:4", "4:6"]])
async def test_prompts_of_any_length(prompt_len: int, max_tokens: int, cuts: list[str]) -> None:
    """The first token has no score, and without an answer nothing is drawn."""
    prompt_ids = LONG_PROMPT[:prompt_len]
    async with scripted_mesh(cuts) as mesh:
        scores, tokens = await score(mesh, prompt_ids=prompt_ids, max_tokens=max_tokens)
        assert scores == reference(prompt_ids)
        assert tokens == expected_tokens_of(max_tokens, prompt_ids=prompt_ids)
        assert mesh.generator.totals.outcomes == {"started": 1, "completed": 1}
        mesh.assert_nothing_left()
        if not max_tokens:
            assert all(step.output_len == 0 for step in mesh.nodes[-1].seen)


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("fate", [Miss(), Cut(applied=True), Crash(1.0), Drop(), Miss("disabled")])
@pytest.mark.parametrize("journal_bytes_max", [1 << 30, 0])
async def test_scores_survive_the_loss_of_any_hop_at_any_chunk(
    hop: int, number: int, fate: Fate, journal_bytes_max: int
) -> None:
    """A replay scores again, and the same."""
    async with scripted_mesh(journal_bytes_max=journal_bytes_max) as mesh:
        mesh.nodes[hop].script = nth(number, fate)
        scores, tokens = await score(mesh, sampling=SEEDED)
        assert scores == reference()
        assert [token.id for token in tokens] == expected(4, sampling=SEEDED, prompt_ids=LONG_PROMPT)
        mesh.assert_nothing_left()


@pytest.mark.parametrize("hops", [(1,), (2,), (0, 1, 2)])
async def test_scores_over_nodes_without_a_cache(hops: tuple[int, ...]) -> None:
    """Everything at once."""
    async with scripted_mesh(node_options={hop: {"kv_cache": False, "caches": False} for hop in hops}) as mesh:
        assert (await score(mesh))[0] == reference()
        mesh.assert_nothing_left()


async def test_scores_with_a_tail_that_returns_text() -> None:
    """Once, before the first of its many prefills."""
    async with scripted_mesh(node_options={2: {"text_tail": True}}) as mesh:
        scores, tokens = await score(mesh)
        assert scores == reference()
        assert [token.id for token in tokens] == expected(4, prompt_ids=LONG_PROMPT)
        mesh.assert_nothing_left()


async def test_the_last_hop_moves_only_to_a_replica_that_scores() -> None:
    """The idle one does not."""
    async with scripted_mesh([*REPLICAS, "4:6"], node_options={5: {"features": ()}}) as mesh:
        mesh.nodes[2].script = nth(2, Crash(back_after_s=None))
        assert (await score(mesh))[0] == reference()
        assert not mesh.nodes[5].seen
        assert mesh.nodes[6].seen


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("sessions_max", [1, 2, 8])
async def test_several_choices_score_the_prompt_once(max_tokens: int, sessions_max: int) -> None:
    """Their log-probabilities are their own."""
    choices = tuple(replace(choice, logprobs=1) for choice in seeded(1, 2, 3))
    async with scripted_mesh(node_options={0: {"sessions_max": sessions_max}}) as mesh:
        scores, tokens = await score(mesh, choices=choices, max_tokens=max_tokens)
        assert scores == reference()
        for index, sampling in enumerate(choices):
            answer = [replace(token, choice=0) for token in tokens if token.choice == index]
            assert answer == expected_tokens_of(max_tokens, sampling=sampling, prompt_ids=LONG_PROMPT)
        scored = sum(step.new_len for step in mesh.nodes[2].seen if step.score is not None)
        assert scored == len(LONG_PROMPT) - 1
        mesh.assert_nothing_left()


async def test_a_prompt_that_is_not_scored_has_no_scores() -> None:
    """Nothing is asked."""
    async with scripted_mesh() as mesh:
        async with mesh.generator.generation(mesh.request(1)) as stream:
            await mesh.drive(anext(stream))
            assert stream.prompt_scores == PromptScores()
        assert all(step.score is None for step in mesh.nodes[2].seen)


async def test_wrong_scores_are_asked_again_and_then_end_the_request() -> None:
    """Rows of other tokens than those that were given."""

    def shift(message: Message, tensors: dict[str, WireTensor]) -> tuple[Message, dict[str, WireTensor]]:
        ids = tensors.get("logprob_ids")
        if ids is None:
            return message, tensors
        values = [value + 1 for value in struct.unpack(f"<{ids.data.nbytes // 4}i", ids.data)]
        data = memoryview(struct.pack(f"<{len(values)}i", *values))
        return message, {**tensors, "logprob_ids": WireTensor("i32", ids.shape, data)}

    async with scripted_mesh() as mesh:
        mesh.nodes[2].script = nth(1, Mangle(shift))
        assert (await score(mesh))[0] == reference()
        mesh.nodes[2].script = lambda _step, _count: Mangle(shift)
        with pytest.raises(GenerationFailed, match="bad_answer"):
            await score(mesh)
        mesh.nodes[2].script = lambda _step, _count: Fail("internal_error")
        with pytest.raises(GenerationFailed, match="internal_error"):
            await score(mesh, choices=(GREEDY, SEEDED))
        await idle()
        mesh.assert_nothing_left()


def test_positions_after_the_prompt_are_left_out() -> None:
    """The last token has nothing after it to score."""
    scorer = PromptScorer((5, 6, 7), top=0)
    asked = scorer.ask(1, 2)
    assert asked is not None
    assert struct.unpack("<2i", asked.tensors["target_ids"].data) == (7, -1)
    assert scorer.ask(2, 4) is None
    with pytest.raises(StepFailed, match="bad_answer"):
        scorer.take(1, 2, {})
    assert not scorer.is_complete
