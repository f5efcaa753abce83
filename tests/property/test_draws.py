"""Invariants of drawing, over any parameters.

The token at a position depends on logits, parameters, the tokens before and the position: not on how these tokens
came to the node, in one prefill, in chunks, one by one, by a fork or by a rebuild. And whatever a step asks for, its
answer is a result, a miss or an error with a code that says what was wrong: nothing is a fault of the node's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import cast

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from shard.executor import Executor
from shard.grammar import GrammarMatcher
from shard.grammar_source import GrammarSource
from shard.kv_cache import SessionStore
from shard.last_hop import begin_grammar, finish
from shard.loader import load_stage
from shard.runner import Pass, PassOutput
from shard.stage import Stage
from shard.stage_runner import StageRunner
from shard.step_queue import QueuedFork, QueuedStep
from shared.errors import MeshError, StepFailed
from shared.layers import LayerRange
from shared.messages import LOGPROBS_MAX, CacheMiss, Error, Fork, SamplingParams, Step, StepResult
from shared.tensor_spec import WireTensor
from tests.support.fake_clock import FakeClock
from tests.support.fake_runner import FakeRunner, write_ids
from tests.support.tiny_models import build_tiny_model, build_tokenizer

LAYERS = LayerRange(0, 2)
VOCAB_SIZE = 400
END = 2
ANSWER_LEN = 6
GRAMMARS = [
    LLMatcher.grammar_from_regex("[a-f]{2,4}"),
    LLMatcher.grammar_from_json_schema({"type": "array", "items": {"type": "boolean"}}),
    LLMatcher.grammar_from_lark("start: word+\nword: /[a-z]/ | /[0-9]+/"),
]


@cache
def grammars() -> GrammarSource:
    """Of a byte-level tokenizer of 400 tokens."""
    folder = Path(mkdtemp())
    build_tokenizer(folder)
    return GrammarSource(folder / "tokenizer.json", [END], VOCAB_SIZE)


class LogitsRunner(FakeRunner):
    """The hashes of the fake model, as seeds of logits from which a token is drawn in earnest."""

    def new_matcher(self, params: SamplingParams) -> GrammarMatcher:  # type: ignore[override]
        """A real one."""
        return grammars().create(params)

    def run(self, passes: Sequence[Pass]) -> list[PassOutput | MeshError]:
        """One step at a time."""
        (each,) = passes
        try:
            begin_grammar(each)
            return super().run(passes)
        except StepFailed as error:
            return [error]

    def _output(self, each: Pass, values: list[int]) -> PassOutput:
        logits = np.random.default_rng(values[-1]).standard_normal(VOCAB_SIZE) * 2
        stage = cast(Stage, None)  # a plain draw asks the head for nothing more
        return finish(stage, each, torch.from_numpy(logits.astype(np.float32)))


class Node:
    """A node without threads; steps in, tokens out."""

    def __init__(self) -> None:
        self.runner = LogitsRunner(LAYERS, 2, vocab_size=VOCAB_SIZE)
        store = SessionStore(ttl_s=100, sessions_max=8, bytes_max=1 << 30, clock=FakeClock())
        self.executor = Executor(runner=self.runner, store=store, model="m", clock=FakeClock())
        self.held: dict[str, int] = {}
        self.step_index = 0

    def enter(self, session: str, ids: Sequence[int], sampling: SamplingParams, *, draws: bool = True) -> int | str:
        """The token after these ids, or the code of the error."""
        self.step_index += 1
        past_len = self.held.get(session, 0)
        step = Step(
            session=session,
            step_index=self.step_index,
            cache="decode" if past_len else "prefill",
            past_len=past_len,
            new_len=len(ids),
            output_len=int(draws),
            layers=LAYERS,
            model="m",
            sampling=None if past_len else sampling,
        )
        message = self.executor.run([QueuedStep(step, {"token_ids": write_ids(ids)}, None, 0.0)])[0].message
        if isinstance(message, Error):
            return message.code
        assert isinstance(message, StepResult), message
        self.held[session] = past_len + len(ids)
        return (message.token_ids or (-1,))[0]

    def fork(self, session: str, target: str) -> None:
        """Copy a session."""
        length = self.held[target] = self.held[session]
        fork = Fork(session=session, target=target, past_len=length, layers=LAYERS, model="m")
        self.executor.fork(QueuedFork(fork, None))


IDS = st.integers(0, VOCAB_SIZE - 1)
NUMBERS = st.floats(-3, 3)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 2**53 - 1),
    prompt_len=st.just(4),
    grammar=st.sampled_from(["", *GRAMMARS]),
    allowed_ids=st.sampled_from([(), tuple(range(300))]),
    banned_ids=st.lists(IDS, max_size=4).map(tuple),
    end_ids=st.sampled_from([(END,), (END, 0)]),
    min_tokens=st.integers(0, 4),
    logit_bias=st.lists(st.tuples(IDS, NUMBERS), max_size=4).map(tuple),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.5]),
    frequency_penalty=NUMBERS,
    presence_penalty=NUMBERS,
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    top_k=st.sampled_from([0, 1, 7, 1000]),
    logprobs=st.sampled_from([None, 0, 5]),
)


@given(sampling=SAMPLING, prompt=st.lists(IDS, min_size=4, max_size=4), cuts=st.sets(st.integers(1, 3)), at=st.data())
def test_a_draw_does_not_depend_on_how_its_history_came(
    sampling: SamplingParams, prompt: list[int], cuts: set[int], at: st.DataObject
) -> None:
    """Chunked, forked and rebuilt sessions say what an undisturbed one says, errors included."""
    node = Node()
    answer = [node.enter("whole", prompt, sampling)]
    while len(answer) < ANSWER_LEN and isinstance(answer[-1], int):
        answer.append(node.enter("whole", [answer[-1]], sampling))
    tokens = [token for token in answer if isinstance(token, int)]

    edges = [0, *sorted(cuts), len(prompt)]
    chunks = [prompt[start:end] for start, end in pairwise(edges)]
    for chunk in chunks[:-1]:
        assert node.enter("s", chunk, sampling, draws=False) == -1
    fork_at = at.draw(st.integers(0, len(tokens)))
    for i, expected in enumerate(answer):
        if i == fork_at and "s" in node.held:
            node.fork("s", "copy")
        if i >= fork_at and "copy" in node.held:
            assert node.enter("copy", chunks[-1] if i == 0 else [tokens[i - 1]], sampling) == expected
        assert node.enter("s", chunks[-1] if i == 0 else [tokens[i - 1]], sampling) == expected
        assert node.enter(f"rebuilt {i}", prompt + tokens[:i], sampling) == expected


@cache
def real_runner() -> StageRunner:
    """A whole tiny model."""
    folder = build_tiny_model("qwen2", Path(mkdtemp()))
    stage = load_stage(folder, LayerRange(0, 6), device="cpu", dtype="float32")
    return StageRunner(stage, tokenizer_json=folder / "tokenizer.json")


ANY_IDS = st.lists(st.integers(0, 2**53 - 1) | IDS, max_size=3).map(tuple)
ANY_SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 1.0, 100.0]),
    seed=st.integers(0, 2**53 - 1),
    prompt_len=st.integers(0, 9) | st.integers(0, 2**53 - 1),
    grammar=st.sampled_from(["", *GRAMMARS]) | st.text(max_size=60),
    allowed_ids=ANY_IDS,
    banned_ids=ANY_IDS,
    end_ids=ANY_IDS,
    min_tokens=st.integers(0, 2**53 - 1),
    logit_bias=st.lists(st.tuples(st.integers(0, 500), st.floats(-1e4, 1e4)), max_size=3).map(tuple),
    repetition_penalty=st.floats(0, 100),
    frequency_penalty=st.floats(-100, 100),
    presence_penalty=st.floats(-100, 100),
    min_p=st.floats(0, 1),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 2**53 - 1),
    logprobs=st.none() | st.integers(0, LOGPROBS_MAX),
)
TENSORS = st.builds(
    lambda dtype, shape, fill: WireTensor(
        dtype, shape, memoryview(bytes([fill]) * (int(np.prod(shape)) * {"i32": 4, "i64": 8, "f32": 4}[dtype]))
    ),
    st.sampled_from(["i32", "i64", "f32"]),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from([0, 1, 255]),
)
CODES = {"bad_grammar", "bad_step", "no_token_allowed", "non_finite_logits"}


@given(
    sampling=st.none() | ANY_SAMPLING,
    ids=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    targets=st.none() | TENSORS | st.lists(st.integers(-2, 400), min_size=1, max_size=5).map(write_ids),
    score=st.none() | st.integers(0, LOGPROBS_MAX),
    pool=st.sampled_from([None, "mean", "last"]),
    cache=st.sampled_from([None, "prefill"]),
    output_len=st.sampled_from([None, 0, 1]),
    forked=st.none() | ANY_SAMPLING,
)
def test_whatever_is_asked_is_answered(  # noqa: PLR0917 - hypothesis names them
    sampling: SamplingParams | None,
    ids: list[int],
    targets: WireTensor | None,
    score: int | None,
    pool: str | None,
    cache: str | None,
    output_len: int | None,
    forked: SamplingParams | None,
) -> None:
    """On a real stage: an answer, or an error that names what was wrong."""
    store = SessionStore(ttl_s=100, sessions_max=8, bytes_max=1 << 30, clock=FakeClock())
    executor = Executor(runner=real_runner(), store=store, model="m", clock=FakeClock())
    fields = {"layers": LayerRange(0, 6), "model": "m"}
    step = Step(
        session="s", step_index=0, cache=cache, new_len=len(ids), output_len=output_len, sampling=sampling,
        score=score, pool=pool, **fields,
    )  # type: ignore[arg-type]  # fmt: skip
    tensors = {"token_ids": write_ids(ids), **({} if targets is None else {"target_ids": targets})}
    answers = executor.run([QueuedStep(step, tensors, None, 0.0)])
    executor.fork(QueuedFork(Fork(session="s", target="t", past_len=len(ids), sampling=forked, **fields), None))  # type: ignore[arg-type]
    decode = Step(session="t", step_index=1, cache="decode", past_len=len(ids), **fields)  # type: ignore[arg-type]
    answers += executor.run([QueuedStep(decode, {"token_ids": write_ids([1])}, None, 0.0)])
    for outcome in answers:
        message = outcome.message
        assert isinstance(message, StepResult | CacheMiss | Error)
        assert not isinstance(message, Error) or message.code in CODES, message
    for tensor in answers[0].tensors.values():
        if tensor.dtype == "f32":
            assert np.isfinite(np.frombuffer(tensor.data, np.float32)).all()
