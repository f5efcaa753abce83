"""The scripted mesh's last hop, by value: tokens, log-probabilities, scores and embeddings."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shard.runner import Pass, PassOutput
from shared.errors import CacheMissed, StepFailed
from shared.layers import LayerRange
from shared.messages import SamplingParams, Step
from tests.support.fake_runner import read_hidden, write_hidden, write_ids
from tests.support.scripted_mesh.director import Director
from tests.support.scripted_mesh.logprobs import ANSWER_LOGPROB, EMBEDDING_SIZE, logprob_row
from tests.support.scripted_mesh.model import TextCoder, build_model
from tests.support.scripted_mesh.runner import IdCache, ScriptedRunner
from tests.support.scripted_mesh.script import ModelPart, read_script

PROMPT = (70, 71, 72)


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> TextCoder:
    """Of the model that is made up."""
    folder = build_model(tmp_path_factory.mktemp("model"), ModelPart())
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    return TextCoder(tokenizer, tokenizer.token_to_id("<|im_end|>"))


def tail(coder: TextCoder, *rules: dict[str, Any], hop: int = 1) -> ScriptedRunner:
    """A hop of a mesh of two; by default the last."""
    script = read_script({"version": 1, "mesh": {"hops": 2}, "rules": list(rules)})
    return ScriptedRunner(
        layers=LayerRange(hop, hop + 1),
        num_layers=2,
        hop=hop,
        director=Director(script, coder),
        context_len=100,
        drop_links=lambda: None,
        crash=lambda _back_after_s: None,
    )


def answer_rule(text: str, **more: Any) -> dict[str, Any]:
    """One answer to everything."""
    return {"match": {"any": True}, "answers": [{"text": text, "split": "character", **more.pop("answer", {})}], **more}


def run(
    runner: ScriptedRunner, ids: tuple[int, ...], cache: IdCache, session: str = "s", **fields: Any
) -> PassOutput | Exception:
    """One step of the last hop."""
    tensors = {"hidden_states": write_hidden(ids)} if runner.hop else {"token_ids": write_ids(ids)}
    if targets := fields.pop("targets", None):
        tensors["target_ids"] = write_ids(targets)
    sampling = fields.pop("sampling", SamplingParams(seed=1))
    step = Step(
        session=session,
        step_index=0,
        cache="decode" if cache.length else "prefill",
        past_len=cache.length,
        new_len=len(ids),
        layers=runner.layers,
        model="m",
        **fields,
    )
    runner.check(step, tensors)
    (output,) = runner.run([Pass(step, tensors, cache, sampling, lambda: False)])
    return output


def rows(output: PassOutput | Exception) -> list[list[tuple[int, float]]]:
    """The log-probabilities of a result."""
    assert isinstance(output, PassOutput)
    logprobs, ids = output.tensors["logprobs"], output.tensors["logprob_ids"]
    count, width = logprobs.shape
    values = struct.unpack(f"<{count * width}f", logprobs.data)
    pairs = list(zip(struct.unpack(f"<{count * width}i", ids.data), values, strict=True))
    return [pairs[start : start + width] for start in range(0, len(pairs), width)]


def test_a_replay_gives_the_same_token(coder: TextCoder):
    """Rebuilt in one prefill, the session goes on where it was."""
    runner, cache = tail(coder, answer_rule("abc")), IdCache()
    first = run(runner, PROMPT, cache)
    assert isinstance(first, PassOutput)
    second = run(runner, first.token_ids or (), cache)
    replayed = run(runner, (*PROMPT, *(first.token_ids or ())), IdCache())
    assert replayed == second
    assert second != first


def test_a_prompt_that_is_named_needs_no_memory(coder: TextCoder):
    """`prompt_len` says where the answer begins."""
    sampling = SamplingParams(seed=1, prompt_len=len(PROMPT))
    ids = coder.answer_ids(read_script({"version": 1, "rules": [answer_rule("ab")]}).rules[0].answer(0))
    output = run(tail(coder, answer_rule("ab")), (*PROMPT, ids[0]), IdCache(), sampling=sampling)
    assert isinstance(output, PassOutput)
    assert output.token_ids == (ids[1],)


def test_a_drawn_token_brings_its_logprobs(coder: TextCoder):
    """Its own first, then the likeliest, of which it is one; a scripted value is given as it is."""
    runner = tail(coder, answer_rule("ab", answer={"logprobs": [-2.0]}))
    cache = IdCache()
    (row,) = rows(run(runner, PROMPT, cache, sampling=SamplingParams(seed=1, logprobs=4)))
    assert row[0][1] == -2.0
    assert row[0] in row[1:]
    (row,) = rows(run(runner, (row[0][0],), cache, sampling=SamplingParams(seed=1, logprobs=0)))
    assert [logprob for _, logprob in row] == [pytest.approx(ANSWER_LOGPROB)]


def test_a_scored_prompt_has_a_row_for_each_target(coder: TextCoder):
    """-1 leaves a position out, and the numbers follow from the ids alone."""
    runner = tail(coder, answer_rule("ab"))
    scored = rows(run(runner, PROMPT, IdCache(), score=2, targets=(71, -1, 73), output_len=0))
    assert [row[0][0] for row in scored] == [71, 73]
    assert all(len(row) == 3 for row in scored)
    again = rows(run(runner, PROMPT, IdCache(), session="t", score=2, targets=(71, -1, 73), output_len=0))
    assert again == scored


def test_pooling_adds_up_over_chunks(coder: TextCoder):
    """The sum over two chunks is that of the whole."""
    runner = tail(coder, answer_rule("ab"))

    def pooled(ids: tuple[int, ...]) -> tuple[float, ...]:
        output = run(runner, ids, IdCache(), pool="mean")
        assert isinstance(output, PassOutput)
        assert output.token_ids is None
        return struct.unpack(f"<{EMBEDDING_SIZE}f", output.tensors["embedding"].data)

    parts = zip(pooled(PROMPT[:1]), pooled(PROMPT[1:]), strict=True)
    assert pooled(PROMPT) == pytest.approx([one + other for one, other in parts], abs=1e-5)


def test_a_hop_that_is_not_last_hands_on_what_it_got(coder: TextCoder):
    """And only as much as is wanted."""
    runner = tail(coder, answer_rule("ab"), hop=0)
    output = run(runner, PROMPT, IdCache(), output_len=1)
    assert isinstance(output, PassOutput)
    assert read_hidden(output.tensors["hidden_states"]) == [PROMPT[-1]]


def test_faults_happen_as_often_as_they_should(coder: TextCoder):
    """Once for each session, or always."""
    once = tail(coder, answer_rule("ab", faults=[{"at": 0, "kind": "miss", "hop": "last"}]))
    assert isinstance(run(once, PROMPT, IdCache()), CacheMissed)
    assert isinstance(run(once, PROMPT, IdCache()), PassOutput)
    assert isinstance(run(once, PROMPT, IdCache(), session="t"), CacheMissed)
    always = tail(coder, answer_rule("ab", faults=[{"at": 0, "kind": "error", "times": 0, "reason": "out_of_memory"}]))
    for _ in range(5):
        error = run(always, PROMPT, IdCache())
        assert isinstance(error, StepFailed)
        assert error.code == "out_of_memory"


@given(
    token=st.integers(0, 49),
    logprob=st.floats(-50, 0),
    alternatives=st.integers(0, 32),
    seed=st.integers(0, 1000),
)
def test_rows_are_a_distribution(token: int, logprob: float, alternatives: int, seed: int):
    """Distinct tokens, best first, no more than one in all, and the token among them if it is likely enough."""
    first, *top = logprob_row(token, logprob, alternatives=alternatives, vocab_size=50, seed=seed)
    assert first == (token, logprob)
    assert len(top) == alternatives == len({one for one, _ in top})
    assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
    assert sum(math.exp(value) for _, value in top) <= 1 + 1e-9
    if top and token not in {one for one, _ in top}:
        assert logprob <= top[-1][1]
