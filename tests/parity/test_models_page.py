"""Verdicts of docs/models.md are sentences."""

from __future__ import annotations

import pytest

from tests.support.models_docs import documented_lines
from tests.support.parity_case import ERROR_CHARS_MAX, in_words


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        ("served", "served"),
        ("refused: model type 'bart' is an encoder-decoder", "refused: model type 'bart' is an encoder-decoder"),
        (
            "refused: its layers cannot be followed: IndexError: `slice` of a 0-dim tensor",
            (
                "refused: its layers cannot be followed, since its code takes a part that is not there: "
                "`'slice' of a 0-dim tensor`"
            ),
        ),
        (
            f"served, without a cache: RuntimeError: {'x' * 100}",
            f"served, without a cache, since its code meets sizes that do not fit: `{'x' * ERROR_CHARS_MAX}…`",
        ),
    ],
)
def test_an_exception_becomes_words(verdict: str, sentence: str) -> None:
    """Its kind in words, and the beginning of what it said as code."""
    assert in_words(verdict) == sentence


def test_the_page_names_no_exception() -> None:
    """No line shows a Python error's name."""
    assert not [line for line in documented_lines().values() if "Error: " in line]
