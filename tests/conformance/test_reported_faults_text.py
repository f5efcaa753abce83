"""Faults of texts and their ends that users reported of other servers; each test is named for the symptom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.conformance.caller import Caller, calling, rule
from tests.support.text_tokenizers import build_metaspace

WIDE = "\U0001f600\u4f60"
RULES = [
    rule("wide characters", {"text": f"a{WIDE}b", "split": "byte"}),
    rule("cut character", {"text": "ok \U0001f600", "split": "byte"}),
    rule("middle of a token", "the weather is fine"),
    rule("one token each", {"text": "abcdefgh", "split": "character"}),
    rule("for ever", {"text": "ab", "end": False}),
]


@pytest.fixture(scope="module")
def caller() -> Iterator[Caller]:
    """One mesh for all tests of this file."""
    with calling(RULES) as running:
        yield running


def test_replacement_characters_appear_where_a_character_is_split(caller: Caller):
    """oobabooga/textgen#1603, antonellof/ferrox#125: neither in the stream nor in the whole answer."""
    answer = caller.both("wide characters")
    assert answer.text == f"a{WIDE}b"
    assert not any("\ufffd" in str(chunk) for chunk in answer.stream.chunks)


@pytest.mark.parametrize("tokens", [4, 5, 6])
def test_a_character_cut_by_the_limit_differs_between_modes(caller: Caller, tokens: int):
    """The DecodeStream of tokenizers never flushes its tail: here the half character is dropped in both modes."""
    answer = caller.both("cut character", max_tokens=tokens)
    assert (answer.text, answer.finish_reason) == ("ok ", "length")
    assert answer.whole["usage"]["completion_tokens"] == tokens


def test_the_leading_space_is_lost_or_doubled(tmp_path: Path):
    """mlx-lm#1754, mlx-examples#681, transformers#28776: text is what the tokens add to the prompt."""
    folder = build_metaspace(tmp_path)
    first = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("\u2581a")
    with calling([rule("hello", {"tokens": [first, first]})], folder=folder, mesh={"hops": 2}) as caller:
        assert caller.both("hello").text == " a a"


@pytest.mark.parametrize("stop", ["eather", "ther is", "e weather is f"])
def test_a_stop_string_is_missed_inside_a_token(caller: Caller, stop: str):
    """vllm#2577, vllm#3672: it is found in the text, wherever tokens begin and end."""
    answer = caller.both("middle of a token", stop=stop)
    assert answer.text == "the weather is fine".partition(stop)[0]
    assert answer.finish_reason == "stop"


def test_half_a_stop_string_is_shown_before_it_is_complete(caller: Caller):
    """vllm#2577: text that may become a stop string is held back, and given out when it does not."""
    assert caller.both("one token each", stop=["cdX", "efg"]).text == "abcd"
    assert caller.both("one token each", stop=["cdX"]).text == "abcdefgh"


@pytest.mark.parametrize("stop", [None, []])
def test_an_absent_stop_is_refused(caller: Caller, stop: object):
    """As guidellm sends null, and lm-eval an empty array."""
    assert caller.both("one token each", stop=stop).text == "abcdefgh"


def test_an_empty_stop_string_ends_the_answer_at_once(caller: Caller):
    """mlc-llm#2070, h2o-llmstudio#54: it is a mistake, and is called one."""
    assert str(caller.error("one token each", stop=[""])["param"]).startswith("stop")
    assert str(caller.error("one token each", stop="")["param"]).startswith("stop")


def test_only_the_first_end_token_ends_an_answer():
    """mlx-vlm#2112, transformers#38330, lighteval#1279: any of the configs' end tokens does, and none is shown."""
    rules = [
        rule("second end", {"text": "done<|eot|>never shown", "end": False}),
        rule("first end", {"text": "done<|im_end|>never shown", "end": False}),
    ]
    with calling(rules, model={"end_tokens": ["<|im_end|>", "<|eot|>"]}) as caller:
        for prompt in ("first end", "second end"):
            answer = caller.both(prompt, max_tokens=50)
            assert (answer.text, answer.finish_reason) == ("done", "stop")


def test_the_answer_ignores_the_limit(caller: Caller):
    """Both names of it; the reason says so."""
    for name in ("max_tokens", "max_completion_tokens"):
        answer = caller.both("for ever", **{name: 5})
        assert answer.finish_reason == "length"
        assert answer.whole["usage"]["completion_tokens"] == 5


def test_the_last_text_comes_with_the_finish_reason(caller: Caller):
    """vllm#35705: the chunk that finishes has an empty delta."""
    last = [chunk["choices"][0] for chunk in caller.stream("one token each").chunks if chunk["choices"]][-1]
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
