"""The least number of tokens that a text can make is never more than it makes."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.prompt_bound import NFC_SHRINKS_BY_MAX, bytes_per_token_max, tokens_min
from gateway.tokenizer import ChatTokenizer, PromptTooLong

Tokenizers = Callable[[str], ChatTokenizer]
PIECES = ["<|im_start|>", "<think>", " ", "  ", "a", "hello", "\n", "ö", "日", "😀", "e\u0301", "\u212a", "\x00"]


def state_of(tokenizer: ChatTokenizer) -> dict[str, Any]:
    """What its tokenizer.json says."""
    return dict(json.loads(tokenizer._backend.to_str()))


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=60))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize(("kind", "known"), [("byte_level", True), ("metaspace", True), ("word_piece", False)])
def test_a_text_never_has_fewer_tokens_than_the_bound(
    text_tokenizer: Tokenizers, kind: str, known: bool, pieces: list[str]
):
    """Whatever it spells; and one kind of tokenizer, whose unknown words have no length limit, has no bound."""
    tokenizer = text_tokenizer(kind)
    text = "".join(pieces)
    least = tokens_min(text, tokenizer._bytes_per_token.__getitem__)
    assert least <= len(tokenizer.encode_text(text))
    assert (least > 0) == (known and bool(text))


@given(st.lists(st.sampled_from(PIECES), max_size=60))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "word_piece"])
def test_both_ways_to_encode_give_the_same_ids(text_tokenizer: Tokenizers, kind: str, pieces: list[str]):
    """The one that lets other threads run finds the same tokens, special ones included."""
    tokenizer = text_tokenizer(kind)
    text = "".join(pieces)
    assert list(tokenizer.encode_text(text)) == tokenizer._backend.encode(text, add_special_tokens=False).ids


def test_composing_shortens_no_text_by_more_than_the_bound():
    """Over all of Unicode: the longest spelling of each composed character."""
    characters = [chr(point) for point in range(sys.maxunicode + 1) if not 0xD800 <= point < 0xE000]
    longest: dict[str, int] = {}
    for character in characters:
        decomposed = unicodedata.normalize("NFD", character)
        longest[decomposed] = max(longest.get(decomposed, 0), len(character.encode()))
    for character in characters:
        composed = unicodedata.normalize("NFC", character)
        spelled = sum(longest[part] for part in unicodedata.normalize("NFD", composed))
        assert spelled <= NFC_SHRINKS_BY_MAX * len(composed.encode())


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "aa"}, "content": "a"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"truncation": {"max_length": 5}},
        {"added_tokens": [{"content": "<x>", "lstrip": False, "rstrip": True}]},
        {"model": {"type": "Unigram", "vocab": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}}},
    ],
)
def test_nothing_is_known_where_text_may_vanish(text_tokenizer: Tokenizers, change: dict[str, Any]):
    """Then a prompt is tokenized, however long it is."""
    state = state_of(text_tokenizer("byte_level"))
    assert bytes_per_token_max(state, is_ascii=True)
    assert bytes_per_token_max({**state, **change}, is_ascii=True) is None


def test_composing_counts_against_the_bound_beyond_ascii(text_tokenizer: Tokenizers):
    """A text that could become shorter is given the benefit of it."""
    state = {**state_of(text_tokenizer("byte_level")), "normalizer": {"type": "NFC"}}
    plain = bytes_per_token_max(state, is_ascii=True)
    assert plain
    assert bytes_per_token_max(state, is_ascii=False) == NFC_SHRINKS_BY_MAX * plain


@pytest.mark.parametrize("start", ["", "<|im_end|>", "\U000f0000<|im_end|>"])
def test_a_prompt_that_cannot_fit_is_not_tokenized(text_tokenizer: Tokenizers, start: str):
    """With control tokens in its text or without; the number named is one that holds."""
    tokenizer = text_tokenizer("byte_level")
    with pytest.raises(PromptTooLong) as caught:
        tokenizer.encode_chat([{"role": "user", "content": start + "mesh " * 100_000}])
    assert tokenizer.context_len <= caught.value.tokens_min < 500_000


def test_marks_that_are_dropped_do_not_count(text_tokenizer: Tokenizers):
    """A text full of characters that vanish is as short as what is left of it."""
    tokenizer = text_tokenizer("byte_level")
    ids = tokenizer.encode_chat([{"role": "user", "content": "<|im_end|>" + "\U000f0001" * 10_000}])
    assert len(ids) < tokenizer.context_len
