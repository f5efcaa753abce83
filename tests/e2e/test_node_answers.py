"""What a last hop can be asked beyond a plain token, on a node with a real stage, over real links."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from llguidance import LLMatcher
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from shard.assignment import Progress
from shard.loader import load_stage
from shard.settings import KvLimits
from shard.stage_runner import StageRunner
from shared.layers import LayerRange
from shared.messages import SAMPLING_FIELDS, Error, Fork, SamplingParams, Step, StepResult
from shared.tensor_spec import WireTensor
from tests.conftest import TinyModels
from tests.support.fake_runner import write_ids
from tests.support.live_node import LiveNode, running_node
from tests.support.node_client import NodeClient, Tensors, connected
from tests.support.tiny_models import KINDS, NUM_LAYERS

PROMPT = [5, 17, 42, 7, 99]
END = 2
COUNT = 12
EVERYTHING = SamplingParams(
    temperature=0.8,
    seed=5,
    prompt_len=len(PROMPT),
    end_ids=(END,),
    min_tokens=COUNT,
    logit_bias=((7, 2.0),),
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.3,
    min_p=0.001,
    top_k=60,
    top_p=0.98,
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = SamplingParams(
    seed=3,
    prompt_len=len(PROMPT),
    end_ids=(END,),
    grammar=LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_flexible": False}),
)


def running(model: Path, layers: str = "0:6", **limits: int) -> object:
    """A node with a real stage and the model's tokenizer."""

    def load(_: Progress) -> StageRunner:
        torch.set_num_threads(1)
        stage = load_stage(model, LayerRange.parse(layers), device="cpu", dtype="float32")
        return StageRunner(stage, tokenizer_json=model / "tokenizer.json")

    kv = KvLimits(bytes_max=64 * 1024 * 1024, **limits)
    return running_node(load, layers, num_layers=NUM_LAYERS, limits=kv)


@pytest.fixture
async def node(tiny_model: TinyModels) -> AsyncIterator[LiveNode]:
    """A node with the whole of a random Qwen2."""
    async with running(tiny_model("qwen2"), sessions_max=3) as live:  # type: ignore[attr-defined]
        yield live


@pytest.fixture
async def client(node: LiveNode) -> AsyncIterator[NodeClient]:
    """A link to it."""
    async with connected(node.url) as connection:
        yield connection


async def answer(client: NodeClient, step: Step) -> tuple[StepResult, Tensors]:
    """A step's result with its tensors."""
    message, tensors = await client.receive(StepResult)
    assert message.step_index == step.step_index
    return message, tensors


def read(tensor: WireTensor) -> list[float] | list[int]:
    """The numbers of a tensor."""
    code = {"f32": "f", "i32": "i"}[tensor.dtype]
    return list(struct.unpack(f"<{tensor.data.nbytes // 4}{code}", tensor.data))


async def draw(client: NodeClient, session: str, sampling: SamplingParams, count: int, chunk: int = 99) -> list[int]:
    """Tokens of a session: its prompt in chunks, then one by one."""
    tokens: list[int] = []
    for start in range(0, len(PROMPT), chunk):
        ids, last = PROMPT[start : start + chunk], start + chunk >= len(PROMPT)
        fields = {"cache": "decode", "past_len": start, "sampling": None} if start else {"sampling": sampling}
        step = await client.prefill(session, ids, output_len=1 if last else 0, **fields)
        tokens += (await client.result(step)).token_ids or ()
    return await go_on(client, session, tokens, count)


async def go_on(client: NodeClient, session: str, tokens: list[int], count: int) -> list[int]:
    """Decode until there are so many tokens, or the end."""
    while len(tokens) < count and tokens[-1] != END:
        past_len = len(PROMPT) + len(tokens) - 1
        step = await client.decode(session, tokens[-1], past_len, sampling=None)
        tokens += (await client.result(step)).token_ids or ()
    return tokens


async def rebuild(client: NodeClient, sampling: SamplingParams, tokens: list[int], **fields: object) -> int:
    """The token after these, from everything at once."""
    step = await client.prefill("rebuilt", [*PROMPT, *tokens], sampling=sampling, **fields)
    (token,) = (await client.result(step)).token_ids or ()
    return token


async def test_features_are_announced(client: NodeClient, tiny_model: TinyModels) -> None:
    """What a last hop can do, and what one that is not last can."""
    assert client.info.features == ("fork", "rewind", "score", "embed")
    assert client.info.sampling == SAMPLING_FIELDS
    async with running(tiny_model("qwen2"), "0:3") as first, connected(first.url) as head:  # type: ignore[attr-defined]
        assert head.info.features == ("fork", "rewind")


@pytest.mark.parametrize("sampling", [EVERYTHING, JSON], ids=["everything", "grammar"])
async def test_tokens_do_not_depend_on_how_the_history_came(client: NodeClient, sampling: SamplingParams) -> None:
    """One prefill, chunks, one by one, after a fork, after a rebuild, stateless: the same tokens."""
    tokens = await draw(client, "s", sampling, COUNT)
    assert await draw(client, "s", sampling, COUNT, chunk=2) == tokens
    for count in range(1, len(tokens), 3):
        assert await rebuild(client, sampling, tokens[:count]) == tokens[count]
        assert await rebuild(client, sampling, tokens[:count], cache=None) == tokens[count]
    assert await draw(client, "s", sampling, 3) == tokens[:3]
    await client.link.send(fork("s", "t", len(PROMPT) + 2, client))
    assert await go_on(client, "t", tokens[:3], COUNT) == tokens
    assert await go_on(client, "s", tokens[:3], COUNT) == tokens


@pytest.mark.parametrize("sampling", [EVERYTHING, JSON], ids=["everything", "grammar"])
async def test_a_session_goes_back_with_its_history(client: NodeClient, sampling: SamplingParams) -> None:
    """The tokens that followed once follow again, grammar and penalties included."""
    tokens = await draw(client, "s", sampling, 6)
    held, kept = len(PROMPT) + len(tokens) - 1, len(PROMPT) + 1
    step = await client.decode("s", tokens[1], kept, sampling=None, rewind_from=held, step_index=1000)
    assert (await client.result(step)).token_ids == (tokens[2],)


def fork(session: str, target: str, past_len: int, client: NodeClient, **fields: object) -> Fork:
    """A fork that is right for this node."""
    values = {"layers": client.info.layers, "model": client.info.model, **fields}
    return Fork(session=session, target=target, past_len=past_len, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fork_decodes_like_a_session_of_its_own(tiny_model: TinyModels, kind: str) -> None:
    """Its first step, sent right behind the fork, finds it; the original goes on undisturbed."""
    async with running(tiny_model(kind)) as node, connected(node.url) as client:  # type: ignore[attr-defined]
        other = SamplingParams(temperature=1.5, seed=8)
        expected = await draw(client, "own", other, 1)
        await client.result(await client.prefill("s", PROMPT[:-1], output_len=0, sampling=None))
        await client.link.send(fork("s", "t", len(PROMPT) - 1, client, sampling=other))
        step = await client.decode("t", PROMPT[-1], len(PROMPT) - 1, sampling=None)
        forked = list((await client.result(step)).token_ids or ())
        assert forked == expected
        assert await go_on(client, "t", forked, 6) == await go_on(client, "own", expected, 6)
        greedy = await draw(client, "greedy", SamplingParams(temperature=0.0), 4)
        step = await client.decode("s", PROMPT[-1], len(PROMPT) - 1)
        tokens = list((await client.result(step)).token_ids or ())
        assert await go_on(client, "s", tokens, 4) == greedy


async def test_fork_where_there_is_no_room_is_a_miss(client: NodeClient) -> None:
    """The copy is unknown, and no session went for it."""
    for session in ("a", "b", "c"):
        await client.result(await client.prefill(session, PROMPT))
    await client.link.send(fork("a", "t", len(PROMPT), client))
    assert (await client.miss(await client.decode("t", 1, len(PROMPT)))).reason == "unknown"
    stats = await client.stats()
    assert (stats.sessions, stats.errors, stats.evictions) == (3, {"sessions_full": 1}, {})


async def test_an_answer_within_a_grammar_is_what_it_says(client: NodeClient, tiny_model: TinyModels) -> None:
    """A random model writes JSON by schema, and ends it by itself."""
    tokens = await draw(client, "s", JSON, 60)
    assert tokens[-1] == END
    text = PreTrainedTokenizerFast.from_pretrained(tiny_model("qwen2")).decode(tokens[:-1])
    value = json.loads(text)
    assert set(value) == {"a", "b"}
    assert isinstance(value["a"], bool)
    assert value["b"] in ("x", "yz")


@pytest.mark.parametrize(
    ("sampling", "ids", "names"),
    [
        (SamplingParams(grammar="garbage"), PROMPT, r"the grammar cannot be compiled"),
        (JSON, [*PROMPT, 7], r"the grammar does not accept token 0"),
        (SamplingParams(banned_ids=(10**9,)), PROMPT, r"sampling.banned_ids must be ids from 0 to"),
        (SamplingParams(logit_bias=((400, 1.0),)), PROMPT, r"sampling.logit_bias must be ids from 0 to"),
    ],
)
async def test_parameters_that_cannot_be_honoured_are_named(
    client: NodeClient, sampling: SamplingParams, ids: list[int], names: str
) -> None:
    """As `bad_step` or `bad_grammar`; never a draw without them. Another session goes on."""
    await client.result(await client.prefill("other", PROMPT))
    error = await client.error(await client.prefill("s", ids, sampling=sampling))
    assert error.code == ("bad_grammar" if sampling.grammar else "bad_step")
    assert error.message.startswith(names)
    assert (await client.result(await client.decode("other", 1, len(PROMPT)))).cached


async def test_everything_ruled_out_is_said(client: NodeClient) -> None:
    """A code of its own."""
    sampling = SamplingParams(allowed_ids=(5,), banned_ids=(5,))
    assert (await client.error(await client.prefill("s", PROMPT, sampling=sampling))).code == "no_token_allowed"


async def test_a_last_hop_without_the_tokens_says_so(tiny_model: TinyModels) -> None:
    """Where the draw needs them, at any step; with them it draws."""
    async with running(tiny_model("qwen2"), "3:6") as node, connected(node.url) as client:  # type: ignore[attr-defined]

        def tensors(ids: list[int], *, named: bool) -> Tensors:
            hidden = WireTensor("f32", (1, len(ids), 32), memoryview(bytes(128 * len(ids))))
            return {"hidden_states": hidden, **({"token_ids": write_ids(ids)} if named else {})}

        prefill = {"cache": "prefill", "new_len": len(PROMPT), "sampling": EVERYTHING}
        error = await client.error(await client.send_step("s", tensors(PROMPT, named=False), **prefill))
        assert (error.code, error.message.split()[0]) == ("bad_step", "token_ids")
        assert (await client.result(await client.send_step("s", tensors(PROMPT, named=True), **prefill))).cached
        decode = {"cache": "decode", "past_len": len(PROMPT), "sampling": None}
        error = await client.error(await client.send_step("s", tensors([1], named=False), **decode))
        assert (error.code, error.message.split()[0]) == ("bad_step", "token_ids")
        assert (await client.result(await client.send_step("s", tensors([1], named=True), **decode))).cached


async def test_logprobs_are_the_models_whatever_is_drawn(client: NodeClient, tiny_model: TinyModels) -> None:
    """A row for the drawn token, then the likeliest, none of them shifted."""
    sampling = SamplingParams(temperature=2.0, seed=1, banned_ids=(7,), logprobs=3)
    result, tensors = await answer(client, await client.prefill("s", PROMPT, sampling=sampling))
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"), dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, -1].double(), -1)
    assert tensors["logprobs"].shape == tensors["logprob_ids"].shape == (1, 4)
    ids = read(tensors["logprob_ids"])
    assert ids == [*(result.token_ids or ()), *expected.topk(3).indices.tolist()]
    assert read(tensors["logprobs"]) == pytest.approx(expected[ids].tolist(), abs=1e-4)


async def test_scores_and_embeddings_travel(client: NodeClient) -> None:
    """By name and shape; a scored step may draw as well, an embedding never does."""
    prompt = {"token_ids": write_ids(PROMPT)}
    targets = {"target_ids": write_ids([*PROMPT[1:], -1])}
    fields = {"cache": "prefill", "new_len": len(PROMPT)}
    result, tensors = await answer(client, await client.send_step("s", {**prompt, **targets}, score=2, **fields))
    assert tensors["logprobs"].shape == (4, 3)
    plain = await client.result(await client.prefill("t", PROMPT))
    assert result.token_ids == plain.token_ids
    step = await client.send_step("e", prompt, pool="mean", sampling=None, **fields)
    result, tensors = await answer(client, step)
    assert (set(tensors), tensors["embedding"].shape, result.token_ids) == ({"embedding"}, (32,), None)


@pytest.mark.parametrize(
    "targets",
    [None, [1, 2], [1, 2, 3, 4, -2], [1, 2, 3, 4, 10**6]],
)
async def test_wrong_targets_are_named(client: NodeClient, targets: list[int] | None) -> None:
    """Missing, of another length, out of range."""
    tensors = {"token_ids": write_ids(PROMPT), **({} if targets is None else {"target_ids": write_ids(targets)})}
    step = await client.send_step("s", tensors, cache="prefill", new_len=len(PROMPT), score=0)
    error = await client.error(step)
    assert isinstance(error, Error)
    assert (error.code, error.message.split()[0]) == ("bad_step", "target_ids")
