"""Log-probabilities in the four lists of a text completion."""

from __future__ import annotations

import math

import pytest

from gateway.completions.logprobs import (
    LogprobRow,
    TextOffsets,
    answer_row,
    mean_logprob,
    prompt_rows,
    rows_json,
    token_text,
)
from gateway.detokenizer import ByteDetokenizer
from gateway.generation_request import PromptScores, TokenLogprobs
from gateway.logprobs import logprob_entry

PIECES = {1: b"a", 2: b"b", 3: b"\xe4\xbd", 4: b"\xa0", 5: b"a", 6: b""}


def spell(token_id: int) -> tuple[str, bytes]:
    """Of the table above."""
    data = PIECES[token_id]
    return data.decode(errors="replace"), data


def test_half_a_character_is_spelled_by_its_bytes():
    """As OpenAI does; whole ones are themselves."""
    assert token_text(*spell(1)) == "a"
    assert token_text(*spell(3)) == r"bytes:\xe4\xbd"
    assert token_text("\ufffd", "\ufffd".encode()) == "\ufffd"


def test_the_token_is_among_its_alternatives_with_the_same_number():
    """Whether or not it is one of the likeliest."""
    unlikely = answer_row(logprob_entry(1, TokenLogprobs(-5.0, ((2, -0.5),)), spell), 7)
    assert unlikely == LogprobRow("a", -5.0, {"a": -5.0, "b": -0.5}, 7)
    likely = answer_row(logprob_entry(2, TokenLogprobs(-0.5, ((2, -0.5),)), spell), 0)
    assert likely.top == {"b": -0.5}
    alone = answer_row(logprob_entry(2, TokenLogprobs(-0.5), spell), 0)
    assert alone.top == {"b": -0.5}


def test_of_two_tokens_that_read_the_same_the_likelier_counts():
    """Else a token would look like the likeliest that is not."""
    row = answer_row(logprob_entry(5, TokenLogprobs(-3.0, ((1, -1.0), (2, -2.0))), spell), 0)
    assert row.top == {"a": -1.0, "b": -2.0}
    assert row.logprob != max(row.top.values())


def test_what_cannot_be_has_a_number_all_the_same():
    """JSON has no infinity."""
    row = answer_row(logprob_entry(1, TokenLogprobs(-math.inf, ((2, -0.5),)), spell), 0)
    assert (row.logprob, row.top) == (-9999.0, {"a": -9999.0, "b": -0.5})


def test_the_first_token_of_a_prompt_has_nulls():
    """Nothing predicts it."""
    scores = PromptScores([None, TokenLogprobs(-1.0, ((2, -1.0),))])
    assert rows_json(prompt_rows((1, 2), (0, 1), scores, spell)) == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"b": -1.0}],
        "text_offset": [0, 1],
    }


def test_a_prompt_that_was_not_scored_whole_is_our_own_fault():
    """Never lists of different lengths."""
    with pytest.raises(ValueError, match="shorter"):
        prompt_rows((1, 2), (0, 1), PromptScores([None]), spell)


def test_a_token_begins_after_the_whole_characters_before_it():
    """The parts of a character begin where it does."""
    offsets = TextOffsets(ByteDetokenizer(PIECES.__getitem__), start=10)
    assert [offsets.push(token_id) for token_id in (1, 3, 4, 6, 2, 1)] == [10, 11, 11, 12, 12, 13]


def test_the_mean_does_not_favour_short_answers():
    """It is per token; an answer without any is neutral."""
    entries = [logprob_entry(1, TokenLogprobs(value), spell) for value in (-1.0, -3.0)]
    assert mean_logprob(entries) == -2.0
    assert mean_logprob([]) == 0.0
