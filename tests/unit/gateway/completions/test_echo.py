"""A prompt as it is repeated: its decoded text, and where its tokens begin in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.completions.echo import echoed_prompt
from gateway.tokenizer import ChatTokenizer

TEXTS = {
    "byte_level": "The m\u00f6sh \u4f60\u597d \U0001f600 end",
    "metaspace": "hello world, hello \u4f60 w\u00f6rld",
    "word_piece": "user mesh nodes a !",
}


@pytest.mark.parametrize("kind", TEXTS)
def test_the_text_is_the_decoded_prompt(text_tokenizer: Callable[[str], ChatTokenizer], kind: str):
    """Whatever the tokenizer strips or joins."""
    tokenizer = text_tokenizer(kind)
    ids = tokenizer.encode_text(TEXTS[kind])
    prompt = echoed_prompt(ids, tokenizer, with_offsets=True)
    assert (prompt.ids, prompt.text) == (ids, TEXTS[kind])


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_offsets_point_at_each_token(text_tokenizer: Callable[[str], ChatTokenizer], kind: str):
    """The text up to a token is what the tokens before it decode to, but for half a character."""
    tokenizer = text_tokenizer(kind)
    ids = tokenizer.encode_text(TEXTS[kind])
    prompt = echoed_prompt(ids, tokenizer, with_offsets=True)
    assert len(prompt.offsets) == len(ids)
    for index, offset in enumerate(prompt.offsets):
        assert prompt.text[:offset] == tokenizer.decode(ids[:index]).rstrip("\ufffd")


def test_special_tokens_take_no_room(text_tokenizer: Callable[[str], ChatTokenizer]):
    """They are not shown."""
    tokenizer = text_tokenizer("byte_level")
    prompt = echoed_prompt(tokenizer.encode_text("<|im_start|>ab<|im_end|>"), tokenizer, with_offsets=True)
    assert prompt.text == "ab"
    assert (prompt.offsets[0], prompt.offsets[1], prompt.offsets[-1]) == (0, 0, 2)


def test_offsets_are_only_made_when_needed(text_tokenizer: Callable[[str], ChatTokenizer]):
    """An echo alone does without."""
    tokenizer = text_tokenizer("byte_level")
    assert echoed_prompt(tokenizer.encode_text("ab"), tokenizer, with_offsets=False).offsets == ()
