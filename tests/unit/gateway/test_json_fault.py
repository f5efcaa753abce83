"""A surrogate without its other half is found, and only that."""

from __future__ import annotations

import pytest

from gateway.json_fault import describe_fault, find_lone_surrogate, is_json_object


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (rb'{"a": "\ud800"}', (7, r"\ud800")),
        (rb'{"a": "x\uDC00y"}', (8, r"\uDC00")),
        (rb'"\ud83d\ude00\ud83d"', (13, r"\ud83d")),
        (rb'"\ud83d\u0041"', (1, r"\ud83d")),
        (rb'"\ud83d\ud83d\ude00"', (1, r"\ud83d")),
        (rb'"\\\ud800"', (3, r"\ud800")),
        (rb'"\ud83d\ude00"', None),
        (rb'"\\ud800"', None),
        (rb'"\u0041\ud7ff\n"', None),
        (rb'"\ud8', None),
        (rb'"\ud80z"', None),
        (b"", None),
    ],
)
def test_only_half_a_pair_is_found(data: bytes, found: tuple[int, str] | None):
    """Pairs, escaped backslashes and escapes that are cut off are none."""
    assert find_lone_surrogate(data) == found


def test_other_faults_keep_their_words():
    """The decoder knows better what they are."""
    assert describe_fault(b"{", ValueError("Input data was truncated")) == "Input data was truncated"


@pytest.mark.parametrize(
    ("text", "expected"), [("{}", True), ('{"a": 1}', True), ("", False), ("{", False), ("[]", False), ("{}x", False)]
)
def test_what_a_json_object_is(text: str, expected: bool):
    """Whole, and nothing else."""
    assert is_json_object(text) == expected
