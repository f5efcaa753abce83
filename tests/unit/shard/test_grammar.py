"""A matcher follows an answer however it arrives, and says what may come next."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from shard.grammar import GrammarMatcher, load_tokenizer
from shard.grammar_source import GrammarSource
from shard.grammar_worker import ABANDONED_MAX, GrammarWorker
from shared.errors import StepFailed
from shared.messages import SamplingParams
from tests.support.tiny_models import build_tokenizer

END, OTHER_END = 2, 0
VOCAB_SIZE = 420
"""More than the tokenizer has."""
AB = str(LLMatcher.grammar_from_regex("(ab)+c?"))


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of 400 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def tokenizer(tokenizer_json: Path) -> LLTokenizer:
    """As llguidance sees it."""
    return load_tokenizer(tokenizer_json.read_text(), [END])


@pytest.fixture
def worker() -> GrammarWorker:
    """The thread that matchers work on."""
    return GrammarWorker()


Create = Callable[..., GrammarMatcher]


@pytest.fixture
def create(tokenizer: LLTokenizer, worker: GrammarWorker) -> Create:
    """Makes matchers."""

    def make(grammar: str = AB, end_ids: tuple[int, ...] = (END, OTHER_END)) -> GrammarMatcher:
        return GrammarMatcher(grammar, end_ids, vocab_size=VOCAB_SIZE, tokenizer=lambda: tokenizer, worker=worker)

    return make


def texts(matcher: GrammarMatcher, tokenizer: LLTokenizer, answer: list[int]) -> set[str | int]:
    """What may come next: text as text, end tokens as ids."""
    ids = np.flatnonzero(matcher.mask(answer)).tolist()
    return {token if token in (END, OTHER_END) else tokenizer.decode_str([token]) for token in ids}


def ids_of(tokenizer: LLTokenizer, text: str) -> list[int]:
    """One token for each character."""
    return [tokenizer.tokenize_str(character)[0] for character in text]


def test_only_what_the_grammar_allows_may_come(create: Create, tokenizer: LLTokenizer) -> None:
    """At each place, and all end tokens exactly where it is satisfied."""
    matcher = create()
    assert texts(matcher, tokenizer, []) == {"a"}
    assert texts(matcher, tokenizer, ids_of(tokenizer, "a")) == {"b"}
    assert texts(matcher, tokenizer, ids_of(tokenizer, "ab")) == {"a", "c", END, OTHER_END}


def test_a_grammar_that_can_only_stop_allows_only_end_tokens(create: Create, tokenizer: LLTokenizer) -> None:
    """Those of the request, not llguidance's own."""
    answer = ids_of(tokenizer, "abc")
    assert texts(create(), tokenizer, answer) == {END, OTHER_END}
    assert texts(create(end_ids=(OTHER_END,)), tokenizer, answer) == {OTHER_END}
    assert texts(create(end_ids=()), tokenizer, answer) == {END}


def test_after_an_end_token_only_end_tokens_may_come(create: Create, tokenizer: LLTokenizer) -> None:
    """The answer is over, even if whoever asked goes on."""
    answer = [*ids_of(tokenizer, "ab"), OTHER_END]
    assert texts(create(), tokenizer, answer) == {END, OTHER_END}
    with pytest.raises(StepFailed, match="does not accept token 3"):
        create().mask([*answer, *ids_of(tokenizer, "a")])


def test_ids_that_only_the_model_has_are_never_allowed(create: Create) -> None:
    """Padding of the vocabulary has no text."""
    mask = create(str(LLMatcher.grammar_from_regex("(.|\n)*"))).mask([])
    assert mask.shape == (VOCAB_SIZE,)
    assert not mask[400:].any()
    assert mask[:400].sum() > 200


@pytest.mark.parametrize("grammar", ["garbage", '{"grammars": [{"json_schema": {"type": "bogus"}}]}', "start: /("])
def test_a_grammar_that_does_not_compile_is_named(create: Create, grammar: str) -> None:
    """With llguidance's reason, and again whenever it is asked."""
    matcher = create(grammar)
    for _ in range(2):
        with pytest.raises(StepFailed, match=r"the grammar cannot be compiled: .+") as caught:
            matcher.mask([])
        assert caught.value.code == "bad_grammar"


def test_a_token_that_the_grammar_does_not_accept_is_named(create: Create, tokenizer: LLTokenizer) -> None:
    """Never an unconstrained draw; and the matcher goes on from a history that is right."""
    matcher = create()
    for wrong in ("b", "aba", "abcc"):
        with pytest.raises(StepFailed, match=r"the grammar does not accept token \d of the answer \["):
            matcher.mask([*ids_of(tokenizer, wrong), ids_of(tokenizer, "x")[0]])
    assert texts(matcher, tokenizer, ids_of(tokenizer, "a")) == {"b"}


def test_what_was_foreseen_wrongly_is_discarded(create: Create, tokenizer: LLTokenizer) -> None:
    """Another token, fewer, or more than foreseen: the mask is that of the answer it is asked for."""
    matcher = create()
    matcher.foresee(ids_of(tokenizer, "ab"))
    assert texts(matcher, tokenizer, ids_of(tokenizer, "a")) == {"b"}
    matcher.foresee(ids_of(tokenizer, "abab"))
    assert texts(matcher, tokenizer, ids_of(tokenizer, "ababc")) == {END, OTHER_END}
    matcher.foresee(ids_of(tokenizer, "xx"))
    with pytest.raises(StepFailed):
        matcher.foresee([])  # what was begun before is told once
    assert texts(matcher, tokenizer, []) == {"a"}


def test_the_mask_is_computed_ahead_on_the_worker(tokenizer: LLTokenizer, worker: GrammarWorker) -> None:
    """`foresee` returns at once, and the mask waits for it."""
    go, threads = threading.Event(), set[str]()

    def wait() -> LLTokenizer:
        threads.add(threading.current_thread().name)
        assert go.wait(5)
        return tokenizer

    matcher = GrammarMatcher(AB, (END,), vocab_size=VOCAB_SIZE, tokenizer=wait, worker=worker)
    matcher.foresee([])
    go.set()
    assert np.flatnonzero(matcher.mask([])).tolist() == ids_of(tokenizer, "a")
    assert threading.current_thread().name not in threads


def test_a_grammar_that_takes_too_long_fails_its_own_session_alone(
    tokenizer: LLTokenizer, worker: GrammarWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is left to it, others go on with a new one, and too many such threads are not taken on."""
    monkeypatch.setattr("shard.grammar.FOLLOW_S_MAX", 0.05)
    go = threading.Event()

    def stuck() -> LLTokenizer:
        go.wait(30)
        return tokenizer

    def create_with(source: Callable[[], LLTokenizer]) -> GrammarMatcher:
        return GrammarMatcher(AB, (END,), vocab_size=VOCAB_SIZE, tokenizer=source, worker=worker)

    matchers = [create_with(stuck) for _ in range(ABANDONED_MAX + 1)]
    for matcher in matchers:
        for _ in range(2):  # the second time without waiting
            with pytest.raises(StepFailed, match="takes more than") as caught:
                matcher.mask([])
            assert caught.value.code == "bad_grammar"
    with pytest.raises(StepFailed, match="still busy"):
        create_with(lambda: tokenizer).mask([])
    go.set()
    deadline = time.monotonic() + 5
    while worker.abandoned:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    monkeypatch.undo()
    assert texts(create_with(lambda: tokenizer), tokenizer, []) == {"a"}


def test_what_waits_behind_a_stuck_grammar_is_done(worker: GrammarWorker) -> None:
    """By the thread that takes over."""
    go, begun = threading.Event(), threading.Event()

    def stuck() -> bool:
        begun.set()
        return go.wait(30)

    first = worker.submit(stuck)
    assert begun.wait(5)
    second = worker.submit(lambda: "done")
    worker.abandon()
    assert second.result(5) == "done"
    go.set()
    assert first.result(5) is True


def test_a_grammar_too_complex_to_follow_says_so(create: Create, tokenizer: LLTokenizer) -> None:
    """The reason is llguidance's, not that a token was refused."""
    schema = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(1000)}}
    matcher = create(str(LLMatcher.grammar_from_json_schema(json.dumps(schema))))
    with pytest.raises(StepFailed, match=r"too complex: .*items"):
        matcher.mask(ids_of(tokenizer, "{"))


def test_a_copy_goes_its_own_way(create: Create, tokenizer: LLTokenizer) -> None:
    """From the same place."""
    matcher = create()
    answer = ids_of(tokenizer, "ab")
    matcher.foresee(answer)
    copy = matcher.copy()
    assert texts(matcher, tokenizer, ids_of(tokenizer, "abc")) == {END, OTHER_END}
    assert texts(copy, tokenizer, ids_of(tokenizer, "aba")) == {"b"}
    assert texts(copy.copy(), tokenizer, answer) == {"a", "c", END, OTHER_END}


def test_a_copy_of_a_failed_matcher_meets_the_failure_itself(create: Create) -> None:
    """Copying raises nothing that a step could not tell."""
    matcher = create("garbage")
    matcher.foresee([])
    copy = matcher.copy()
    with pytest.raises(StepFailed, match="cannot be compiled"):
        copy.mask([])


def test_a_model_without_tokenizer_follows_no_grammar(tmp_path: Path, tokenizer_json: Path) -> None:
    """It says so, and so does one whose tokenizer cannot be read."""
    for missing in (None, tmp_path / "tokenizer.json"):
        source = GrammarSource(missing, [END], VOCAB_SIZE)
        assert not source.can_follow
        with pytest.raises(StepFailed, match=r"no tokenizer\.json"):
            source.create(SamplingParams(grammar=AB))
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(StepFailed, match=r"cannot be followed: the model's tokenizer\.json"):
        GrammarSource(broken, [END], VOCAB_SIZE).create(SamplingParams(grammar=AB)).mask([])
    assert GrammarSource(tokenizer_json, [END], VOCAB_SIZE).create(SamplingParams(grammar=AB)).mask([]).any()
