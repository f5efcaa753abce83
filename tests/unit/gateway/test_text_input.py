"""Texts that come without messages, in all their forms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai_errors import ApiError
from gateway.text_input import TextInput, check_total, input_paths, read_text_inputs, tokenize_inputs
from gateway.tokenizer import ChatTokenizer

IDS = st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)


@given(IDS)
def test_ids_are_one_text_and_lists_of_ids_are_several(ids: list[int]):
    """Whatever their size: the vocabulary is checked later."""
    assert read_text_inputs(ids, "prompt", items_max=1) == (tuple(ids),)
    assert read_text_inputs([ids, ids], "prompt", items_max=2) == (tuple(ids), tuple(ids))


@given(JSON)
def test_anything_is_read_or_refused_by_name(value: object):
    """Never a crash; what is read is text or ids."""
    found, refused = read_or_refusal(value)
    if refused is not None:
        assert refused.status == 400
        assert (refused.param or "").startswith("prompt")
    else:
        assert 1 <= len(found) <= 2
        assert all(isinstance(item, str) or all(type(one) is int for one in item) for item in found)


def read_or_refusal(value: object) -> tuple[tuple[TextInput, ...], ApiError | None]:
    """One of the two."""
    try:
        return read_text_inputs(value, "prompt", items_max=2), None
    except ApiError as error:
        return (), error


def test_messages_name_an_item_only_where_there_are_several():
    """As the caller wrote it."""
    assert input_paths(["a"], "prompt") == ["prompt"]
    assert input_paths(["a", (1,)], "prompt") == ["prompt[0]", "prompt[1]"]


async def test_texts_and_ids_keep_their_order(text_tokenizer: Callable[[str], ChatTokenizer]):
    """Though all texts are tokenized together."""
    tokenizer = text_tokenizer("byte_level")
    ids = await tokenize_inputs(["ab", (7, 8), "c"], tokenizer, "input")
    assert ids == [tokenizer.encode_text("ab"), (7, 8), tokenizer.encode_text("c")]


async def test_long_texts_are_tokenized_as_short_ones_are(text_tokenizer: Callable[[str], ChatTokenizer]):
    """Elsewhere, with the same result."""
    tokenizer = text_tokenizer("metaspace")
    text = "hello world " * 2000
    assert await tokenizer.encode_texts([text], add_special_tokens=False) == [tokenizer.encode_text(text)]


def test_the_limit_of_a_call_is_for_all_its_texts():
    """Each may be short."""
    check_total([(1,), (2, 3)], "prompt", tokens_max=3)
    with pytest.raises(ApiError, match="at most 2 tokens"):
        check_total([(1,), (2, 3)], "prompt", tokens_max=2)
