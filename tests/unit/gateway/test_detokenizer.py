"""Ids to text, token by token: the same text as decoding all at once, and never half a character."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.detokenizer import (
    REPLACEMENT,
    WINDOW_HELD_TOKENS_MAX,
    ByteDetokenizer,
    WindowDetokenizer,
    byte_level_piece,
    metaspace_piece,
    piece_function,
)
from gateway.tokenizer import ChatTokenizer

Tokenizers = Callable[[str], ChatTokenizer]
BYTE_LEVEL_IDS = st.lists(st.integers(0, 420), max_size=40)
TEXT = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\u2581"), max_size=30)


def shown(tokenizer: ChatTokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    """What a stream shows for each token."""
    detokenizer = tokenizer.detokenizer(prompt)
    return [detokenizer.push(token_id) for token_id in ids]


def decoded_after(tokenizer: ChatTokenizer, prompt: list[int], ids: list[int]) -> str:
    """What decoding the prompt with the answer adds to decoding the prompt."""
    return tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)) :]


def without_cut_character(text: str) -> str:
    """A character that the end cuts through shows in a whole decode as one U+FFFD."""
    return text.removesuffix(REPLACEMENT)


@given(ids=BYTE_LEVEL_IDS)
def test_byte_level_text_is_that_of_a_whole_decode(text_tokenizer: Tokenizers, ids: list[int]):
    """Any ids, special, unknown and invalid UTF-8 among them, give the library's own text up to a cut character."""
    tokenizer = text_tokenizer("byte_level")
    text = "".join(shown(tokenizer, [74, 75], ids))
    expected = decoded_after(tokenizer, [74, 75], ids)
    assert text in (expected, without_cut_character(expected))


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@given(text=TEXT, prompt=TEXT)
def test_encoded_text_comes_back_whole(text_tokenizer: Tokenizers, kind: str, text: str, prompt: str):
    """Every text survives encoding and streaming, with no U+FFFD on the way that it did not hold itself."""
    tokenizer = text_tokenizer(kind)
    prompt_ids = list(tokenizer.encode_text("a" + prompt.replace("<", "")))
    ids = list(tokenizer.encode_text(text.replace("<", "")))
    pieces = shown(tokenizer, prompt_ids, ids)
    assert "".join(pieces) == decoded_after(tokenizer, prompt_ids, ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(ids=st.lists(st.integers(259, 290), max_size=30))
def test_metaspace_words_in_any_order_are_those_of_a_whole_decode(text_tokenizer: Tokenizers, ids: list[int]):
    """Spaces between words, and before the first, are where the library puts them after a prompt."""
    tokenizer = text_tokenizer("metaspace")
    prompt = list(tokenizer.encode_text("a"))
    assert "".join(shown(tokenizer, prompt, ids)) == decoded_after(tokenizer, prompt, ids)


@given(ids=st.lists(st.integers(0, 12), max_size=30))
@example(ids=[0] * 8 + [3])  # a window full of special tokens is not the start of a text
def test_another_decoder_is_followed_through_a_window(text_tokenizer: Tokenizers, ids: list[int]):
    """WordPiece joins and separates words by rules; the stream follows them."""
    tokenizer = text_tokenizer("word_piece")
    prompt = list(tokenizer.encode_text("user"))
    assert "".join(shown(tokenizer, prompt, ids)) == decoded_after(tokenizer, prompt, ids)


def test_a_prompt_that_ends_in_special_tokens_is_no_start_of_a_text(text_tokenizer: Tokenizers):
    """The space between the prompt's last word and the answer's first is the answer's, whatever stands between."""
    tokenizer = text_tokenizer("word_piece")
    prompt = [*tokenizer.encode_text("user"), *([0] * 9)]
    assert "".join(shown(tokenizer, prompt, [3, 3])) == decoded_after(tokenizer, prompt, [3, 3]) == " user user"


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("character", ["ö", "你", "😀"])
def test_a_character_appears_with_its_last_byte_and_not_before(text_tokenizer: Tokenizers, kind: str, character: str):
    """Byte after byte shows nothing, then the whole character."""
    tokenizer = text_tokenizer(kind)
    table = {token: index for index in range(400) if (token := tokenizer.detokenizer([0])._piece(index))}
    ids = [table[bytes([byte])] for byte in character.encode()]
    assert shown(tokenizer, [0], ids) == [""] * (len(ids) - 1) + [character]


def test_special_tokens_are_not_shown_and_visible_added_tokens_are(text_tokenizer: Tokenizers):
    """`<think>` is text to the caller, `<|im_start|>` is not."""
    tokenizer = text_tokenizer("byte_level")
    assert "".join(shown(tokenizer, [74], list(tokenizer.encode_text("<think>a<|im_start|>b")))) == "<think>ab"


@pytest.mark.parametrize(
    ("shown_tokens", "expected"),
    [(frozenset(), "ab"), (frozenset({"<|im_start|>"}), "a<|im_start|>b"), (None, "a<|im_start|>b<|endoftext|>")],
)
def test_special_tokens_are_shown_where_that_is_asked(
    text_tokenizer: Tokenizers, shown_tokens: frozenset[str] | None, expected: str
):
    """All of them, or those that a parser needs to see."""
    tokenizer = text_tokenizer("byte_level")
    detokenizer = tokenizer.detokenizer([74], shown_tokens)
    ids = tokenizer.encode_text("a<|im_start|>b<|endoftext|>")
    assert "".join(map(detokenizer.push, ids)) == expected


def test_a_window_shows_special_tokens_where_that_is_asked(text_tokenizer: Tokenizers):
    """Whatever the decoder."""
    tokenizer = text_tokenizer("word_piece")
    ids = tokenizer.encode_text("mesh<|im_start|>node")
    for shown_tokens, is_shown in ((frozenset(), False), (None, True)):
        detokenizer = tokenizer.detokenizer([3], shown_tokens)
        text = "".join(map(detokenizer.push, ids))
        assert ("<|im_start|>" in text, "mesh" in text) == (is_shown, True)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_a_tokens_spelling_is_its_own_bytes(text_tokenizer: Tokenizers, kind: str):
    """Also of part of a character; joined they are the text."""
    tokenizer = text_tokenizer(kind)
    table = {token: index for index in range(400) if (token := tokenizer.detokenizer([0])._piece(index))}
    first, *_ = ids = [table[bytes([byte])] for byte in "😀".encode()]
    assert tokenizer.spell(first) == (REPLACEMENT, b"\xf0")
    assert b"".join(tokenizer.spell(token_id)[1] for token_id in ids) == "😀".encode()
    assert tokenizer.spell(2) == ("<|im_end|>", b"<|im_end|>")
    assert tokenizer.spell(10**6) == ("", b"")


def test_a_spelling_under_another_decoder_is_what_the_token_alone_decodes_to(text_tokenizer: Tokenizers):
    """There is no table of bytes."""
    tokenizer = text_tokenizer("word_piece")
    (mesh,) = tokenizer.encode_text("mesh")
    assert tokenizer.spell(mesh) == ("mesh", b"mesh")


def test_the_space_before_the_first_word_is_kept(text_tokenizer: Tokenizers):
    """An answer whose first token is "▁a" continues the prompt with a space, as a whole decode says."""
    tokenizer = text_tokenizer("metaspace")
    ids = [token_id for token_id in range(259, 290) if tokenizer.detokenizer([0])._piece(token_id) == b" a"]
    prompt = list(tokenizer.encode_text("w"))
    assert shown(tokenizer, prompt, ids) == [" a"]


def test_invalid_bytes_become_replacements_as_soon_as_that_is_certain():
    """A byte that can begin no character is not waited for."""
    detokenizer = ByteDetokenizer(lambda byte: bytes([byte]))
    assert [detokenizer.push(byte) for byte in b"\xffa\xe4\xbda"] == [REPLACEMENT, "a", "", "", f"{REPLACEMENT}a"]


def test_a_window_does_not_wait_for_ever():
    """Text that goes on ending in U+FFFD is shown after as many tokens as a character has bytes."""
    detokenizer = WindowDetokenizer(lambda ids: REPLACEMENT * len(ids), [])
    pieces = [detokenizer.push(0) for _ in range(WINDOW_HELD_TOKENS_MAX + 1)]
    assert pieces == [""] * WINDOW_HELD_TOKENS_MAX + [REPLACEMENT * (WINDOW_HELD_TOKENS_MAX + 1)]


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        ({"type": "ByteLevel"}, byte_level_piece),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}]}, byte_level_piece),
        ({"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}, metaspace_piece),
        ({"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}, None),
        ({"type": "Replace", "pattern": {"String": "_"}, "content": " "}, None),
        ({"type": "Strip", "content": "x", "start": 0, "stop": 1}, None),
        ({"type": "WordPiece", "prefix": "##"}, None),
        (None, None),
    ],
)
def test_decoders_that_only_join_bytes_are_recognized(decoder: dict[str, object] | None, expected: object):
    """Anything else goes through the window."""
    assert piece_function(decoder) is expected


@pytest.mark.parametrize(
    ("token", "expected"),
    [("<0xE4>", b"\xe4"), ("<0xZZ>", b"<0xZZ>"), ("\u2581a\u2581", b" a "), ("\u4f60", "\u4f60".encode())],
)
def test_metaspace_tokens_are_bytes_or_text(token: str, expected: bytes):
    """A byte token is its byte, a token that only looks like one is text."""
    assert metaspace_piece(token) == expected
