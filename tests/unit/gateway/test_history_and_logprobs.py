"""Draws that depend on the tokens before, and log-probabilities of what was drawn."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from gateway.errors import GenerationFailed
from shared.messages import Message, SamplingParams
from shared.tensor_spec import WireTensor
from tests.support.memory_mesh import PROMPT, ScriptedMesh, expected_tokens_of, idle, scripted_mesh, seeded
from tests.support.scripted_node import VOCAB_SIZE, Crash, Cut, Drop, Fail, Fate, Mangle, Miss, nth

LONG_PROMPT = tuple(range(100, 119))
HISTORY = SamplingParams(temperature=0.7, seed=3, frequency_penalty=0.5, prompt_len=len(PROMPT))
BOTH = replace(HISTORY, logprobs=2)


async def check(mesh: ScriptedMesh, sampling: SamplingParams, max_tokens: int = 8, **fields: object) -> None:
    """Generate with this sampling, compare every token and its log-probabilities, and look for what is left."""

    async def collect() -> list[object]:
        async with mesh.generator.generation(mesh.request(max_tokens, sampling=sampling, **fields)) as tokens:
            return [token async for token in tokens]

    tokens = await mesh.drive(collect())
    await idle()
    assert tokens == expected_tokens_of(max_tokens, sampling=sampling, **fields)
    mesh.assert_nothing_left()


@pytest.mark.parametrize("cuts", [["0:6"], ["0:1", "1:6"], ["0:2", "2:4", "4:6"]])
@pytest.mark.parametrize("prompt_len", [1, 4, 9])
async def test_the_last_hop_is_told_which_tokens_stand_where(cuts: list[str], prompt_len: int) -> None:
    """In every chunk and every decode; the nodes refuse a step that names too few or too many."""
    async with scripted_mesh(cuts) as mesh:
        await check(mesh, HISTORY, prompt_ids=tuple(range(50, 50 + prompt_len)))


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("fate", [Miss(), Cut(), Crash(1.0), Drop(), Fail("internal_error"), Miss("disabled")])
@pytest.mark.parametrize("number", [0, 2, 7])
async def test_the_history_moves_with_the_position(hop: int, fate: Fate, number: int) -> None:
    """A rebuilt hop draws as the lost one would have, log-probabilities included."""
    async with scripted_mesh() as mesh:
        mesh.nodes[hop].script = nth(number, fate)
        await check(mesh, BOTH, prompt_ids=LONG_PROMPT)


@pytest.mark.parametrize("hops", [(1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("journal_bytes_max", [1 << 30, 0])
async def test_a_stateless_hop_is_told_the_whole_history(hops: tuple[int, ...], journal_bytes_max: int) -> None:
    """Each time."""
    options = {hop: {"caches": False} for hop in hops}
    async with scripted_mesh(node_options=options, journal_bytes_max=journal_bytes_max) as mesh:
        await check(mesh, BOTH)


@pytest.mark.parametrize("fate", [None, Miss(), Crash(1.0), Miss("disabled")])
@pytest.mark.parametrize("journal_bytes_max", [1 << 30, 0])
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.7, seed=3), HISTORY])
async def test_hops_that_want_ids_get_them(fate: Fate | None, journal_bytes_max: int, sampling: SamplingParams) -> None:
    """With every step, also one that rebuilds; hops that do not want them are spared."""
    cuts, options = ["0:1", "1:3", "3:5", "5:6"], {hop: {"needs_token_ids": True} for hop in (1, 2)}
    async with scripted_mesh(cuts, node_options=options, journal_bytes_max=journal_bytes_max) as mesh:
        if fate is not None:
            mesh.nodes[1].script = nth(3, fate)
        await check(mesh, sampling, prompt_ids=LONG_PROMPT)


async def test_a_tail_that_returns_text_is_told_the_history() -> None:
    """With every prefill."""
    async with scripted_mesh(node_options={2: {"text_tail": True}}) as mesh:
        await check(mesh, HISTORY)


async def test_a_text_has_no_log_probabilities() -> None:
    """A tail that promised them and answers with text is not taken to have given them."""
    async with scripted_mesh(node_options={2: {"text_tail": True}}) as mesh:
        with pytest.raises(GenerationFailed, match="bad_answer"):
            await mesh.drive(mesh.generate(sampling=BOTH))


async def test_choices_with_history_share_the_prompts() -> None:
    """And have each their own from there."""
    choices = seeded(1, 2, presence_penalty=1.0, prompt_len=len(PROMPT))
    async with scripted_mesh() as mesh:
        mesh.nodes[2].loses_fork = lambda _fork: True
        answers = await mesh.drive(mesh.generate_choices(choices=choices))
        for choice, answer in zip(choices, answers, strict=True):
            assert answer == [token.id for token in expected_tokens_of(sampling=choice)]
        await idle()
        mesh.assert_nothing_left()


async def test_without_need_no_ids_travel() -> None:
    """The steps of a plain draw are as small as before."""
    async with scripted_mesh() as mesh:
        await mesh.drive(mesh.generate())
        mesh.assert_nothing_left()  # a node counts a tensor too many as a fault


@pytest.mark.parametrize("top", [0, 1, 20])
async def test_tokens_come_with_their_log_probabilities(top: int) -> None:
    """The token's own and so many of the likeliest."""
    async with scripted_mesh() as mesh:
        await check(mesh, SamplingParams(temperature=0.0, logprobs=top))


def floats(*values: float) -> WireTensor:
    """One row of f32."""
    return WireTensor("f32", (1, len(values)), memoryview(struct.pack(f"<{len(values)}f", *values)))


def ints(*values: int) -> WireTensor:
    """One row of i32."""
    return WireTensor("i32", (1, len(values)), memoryview(struct.pack(f"<{len(values)}i", *values)))


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param({"logprobs": None}, id="no logprobs"),
        pytest.param({"logprob_ids": None}, id="no ids"),
        pytest.param({"logprobs": floats(-1.0)}, id="too few"),
        pytest.param({"logprobs": ints(1, 2)}, id="another type"),
        pytest.param({"logprobs": floats(float("nan"), -1.0)}, id="not a number"),
        pytest.param({"logprobs": floats(2.0, -1.0)}, id="more than certain"),
        pytest.param({"logprob_ids": ints(1, -5)}, id="no token"),
        pytest.param({"logprob_ids": ints(5, VOCAB_SIZE)}, id="a token outside the vocabulary"),
        pytest.param({"logprob_ids": ints(1001, 5)}, id="another token than was drawn"),
    ],
)
async def test_useless_log_probabilities_are_asked_again(garbage: dict[str, WireTensor | None]) -> None:
    """Like any nonsense of a node; when they stay so, the generation ends."""

    def change(message: Message, tensors: dict[str, WireTensor]) -> tuple[Message, dict[str, WireTensor]]:
        return message, {name: tensor for name, tensor in {**tensors, **garbage}.items() if tensor is not None}

    sampling = SamplingParams(temperature=0.0, logprobs=1)
    async with scripted_mesh() as mesh:
        mesh.nodes[2].script = nth(3, Mangle(change))
        await check(mesh, sampling)
        mesh.nodes[2].script = lambda _step, _count: Mangle(change)
        with pytest.raises(GenerationFailed, match="bad_answer"):
            await mesh.drive(mesh.generate(sampling=sampling))
