"""A Range header is read as RFC 9110 says."""

from __future__ import annotations

import pytest

from gateway.byte_range import RangeNotSatisfiable, parse_range
from shared.models.spans import Span


@pytest.mark.parametrize(
    ("header", "span"),
    [
        ("bytes=0-0", Span(0, 1)),
        ("bytes=10-19", Span(10, 20)),
        ("bytes=10-", Span(10, 100)),
        ("bytes=90-500", Span(90, 100)),
        ("bytes=-5", Span(95, 100)),
        ("bytes=-500", Span(0, 100)),
    ],
)
def test_one_range_is_taken_and_cut_to_the_file(header: str, span: Span):
    """From, from and to, or the last so many."""
    assert parse_range(header, 100) == span


@pytest.mark.parametrize(
    "header", [None, "", "bytes=-", "bytes=5-4", "bytes=1-2,5-6", "lines=1-2", "bytes=a-b", "bytes 1-2", "bytes=--1"]
)
def test_what_is_not_one_range_of_bytes_is_ignored(header: str | None):
    """The whole file is sent then."""
    assert parse_range(header, 100) is None


@pytest.mark.parametrize(
    ("header", "size"), [("bytes=100-", 100), ("bytes=100-200", 100), ("bytes=-0", 100), ("bytes=0-", 0)]
)
def test_a_range_without_a_byte_of_the_file_is_an_error(header: str, size: int):
    """416."""
    with pytest.raises(RangeNotSatisfiable):
        parse_range(header, size)
