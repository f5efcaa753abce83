"""How long an answer may be: what was asked for, what there is room for, or a 400."""

from __future__ import annotations

import pytest

from gateway.__main__ import own_names
from gateway.chat_request import AnswerAsked
from gateway.openai_errors import ApiError
from gateway.state import ServedModel
from gateway.turn import fit_answer


@pytest.mark.parametrize(("asked", "expected"), [(None, 40), (1, 1), (40, 40)])
def test_an_answer_gets_what_it_asked_for_or_the_rest(asked: int | None, expected: int):
    """Of a window of 100 with a prompt of 60."""
    assert fit_answer(AnswerAsked(max_tokens=asked), prompt_tokens=60, context_len=100) == expected


@pytest.mark.parametrize(("asked", "expected"), [(7, 7), (40, 40), (41, 40), (2**31 - 1, 40)])
def test_a_bound_is_lowered_to_what_there_is_room_for(asked: int, expected: int):
    """Clients of some APIs always send the largest number they know."""
    answer = AnswerAsked(max_tokens=asked, max_tokens_is_bound=True)
    assert fit_answer(answer, prompt_tokens=60, context_len=100) == expected


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (AnswerAsked(max_tokens=41), "you requested 41"),
        (AnswerAsked(max_tokens=500, max_tokens_is_bound=True), "leaves no room"),
    ],
)
def test_what_cannot_fit_is_refused(answer: AnswerAsked, words: str):
    """A number that was meant, or a prompt that fills the window: a bound is not to blame for that."""
    prompt_tokens = 100 if answer.max_tokens_is_bound else 60
    with pytest.raises(ApiError, match=words):
        fit_answer(answer, prompt_tokens=prompt_tokens, context_len=100)


def test_a_model_answers_to_what_it_was_asked_for_by():
    """A catalogue's name is one of its names; a path is none."""
    assert own_names("default", "qwen2.5-coder-0.5b-instruct") == ("qwen2.5-coder-0.5b-instruct", "default")
    assert own_names("./folder", "folder") == ("folder",)
    assert own_names("qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-0.5b-instruct") == ("qwen2.5-coder-0.5b-instruct",)


def test_every_name_that_is_accepted_is_listed_once():
    """`default` always is."""
    served = ServedModel(names=("own", "alias"), fingerprint="f", created=0)
    assert served.accepted == ("own", "alias", "default")
    for name in served.accepted:
        served.check(name)
    with pytest.raises(ApiError):
        served.check("other")
    assert ServedModel(names=("default",), fingerprint="f", created=0).accepted == ("default",)
