"""One answer: where it ends, why, what is counted, and that chunking never changes its text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answer import Answer
from gateway.detokenizer import ByteDetokenizer
from gateway.stop import StopMatcher
from gateway.tokenizer import ChatTokenizer

EOS = 2


def create_answer(stops: tuple[str, ...] = (), max_tokens: int = 100) -> Answer:
    """An answer whose token ids are bytes."""
    detokenizer = ByteDetokenizer(lambda token_id: bytes([token_id]))
    return Answer(detokenizer, StopMatcher(stops), eos_ids={EOS, 7}, max_tokens=max_tokens)


def push_all(answer: Answer, ids: bytes) -> str:
    """Push up to the end and return the text."""
    text = ""
    for token_id in ids:
        text += answer.push(token_id)
        if answer.finish_reason is not None:
            break
    return text


@pytest.mark.parametrize("eos", [EOS, 7])
def test_any_end_token_ends_the_answer_and_is_counted_but_not_shown(eos: int):
    """Models have several end tokens; each of them means `stop`."""
    answer = create_answer()
    assert push_all(answer, b"ab" + bytes([eos]) + b"c") == "ab"
    assert (answer.finish_reason, answer.completion_tokens) == ("stop", 3)


def test_the_last_token_allowed_ends_the_answer_with_length():
    """`length` with exactly as many tokens as were asked for."""
    answer = create_answer(max_tokens=2)
    assert push_all(answer, b"abc") == "ab"
    assert (answer.finish_reason, answer.completion_tokens) == ("length", 2)


def test_an_end_token_as_the_last_token_allowed_means_stop():
    """The model had finished by itself."""
    answer = create_answer(max_tokens=2)
    push_all(answer, bytes([97, EOS]))
    assert answer.finish_reason == "stop"


def test_a_stop_string_on_the_last_token_allowed_means_stop():
    """The stop string was complete, so nothing was cut."""
    answer = create_answer(("bc",), max_tokens=3)
    assert push_all(answer, b"abc") == "a"
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("end", [bytes([EOS]), b""])
def test_held_back_text_comes_out_at_the_end(end: bytes):
    """The beginning of a stop string that never came belongs to the answer."""
    answer = create_answer(("bcd",), max_tokens=4 if end else 3)
    assert push_all(answer, b"abc" + end) == "abc"


def test_a_character_that_the_limit_cuts_is_dropped():
    """Neither half of it nor a replacement is shown, streaming or not."""
    answer = create_answer(max_tokens=4)
    assert push_all(answer, b"a" + "\U0001f600".encode()) == "a"
    assert answer.finish_reason == "length"


def test_a_finished_answer_takes_no_more():
    """Pushing on would count tokens that nobody asked for."""
    answer = create_answer(max_tokens=1)
    answer.push(97)
    with pytest.raises(ValueError, match="finished"):
        answer.push(98)


@given(
    ids=st.lists(st.integers(3, 399), min_size=1, max_size=40),
    stops=st.lists(st.text(alphabet="ethnr \n", min_size=1, max_size=3), max_size=3),
)
def test_the_text_is_the_decoded_text_before_the_first_stop_string(
    text_tokenizer: Callable[[str], ChatTokenizer], ids: list[int], stops: list[str]
):
    """Whatever tokens come, what is shown is a prefix of the decoded text and holds no stop string."""
    tokenizer = text_tokenizer("byte_level")
    answer = Answer(tokenizer.detokenizer([74]), StopMatcher(stops), eos_ids=tokenizer.eos_ids, max_tokens=len(ids))
    text = ""
    for token_id in ids:
        text += answer.push(token_id)
        if answer.finish_reason is not None:
            break
    whole = tokenizer.decode([74, *ids])[len(tokenizer.decode([74])) :]
    assert whole.startswith(text)
    assert not any(stop in text for stop in stops)
    assert answer.finish_reason == ("stop" if any(stop in whole for stop in stops) else "length")
