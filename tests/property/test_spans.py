"""Byte ranges are planned exactly: everything wanted, next to nothing else, and no byte twice."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shared.models.spans import SURPLUS_SHARE, Span, coalesce, covers, cut, merge, subtract, total_bytes

FILE_BYTES = 400


@st.composite
def spans_of(draw: st.DrawFn) -> list[Span]:
    """Spans of a small file, in any order, overlapping, touching and empty ones among them."""
    starts = draw(st.lists(st.integers(0, FILE_BYTES), max_size=12))
    return [Span(start, start + draw(st.integers(0, 60))) for start in starts]


SPANS = spans_of()


def bytes_of(spans: list[Span]) -> set[int]:
    """The model: a set of offsets."""
    return {offset for span in spans for offset in range(span.start, span.end)}


def is_tidy(spans: list[Span]) -> bool:
    """In order, disjoint, none empty."""
    return all(span.nbytes > 0 for span in spans) and all(a.end <= b.start for a, b in pairwise(spans))


@given(SPANS)
def test_merging_changes_no_byte_and_leaves_no_neighbours(spans: list[Span]):
    """The fewest spans with the same bytes."""
    merged = merge(spans)
    assert bytes_of(merged) == bytes_of(spans)
    assert is_tidy(merged)
    assert all(a.end < b.start for a, b in pairwise(merged))
    assert total_bytes(merged) == len(bytes_of(spans))


@given(SPANS, SPANS)
def test_what_is_left_is_what_is_not_there(wanted: list[Span], present: list[Span]):
    """Set difference; nothing is left exactly if all is covered."""
    left = subtract(wanted, present)
    assert bytes_of(left) == bytes_of(wanted) - bytes_of(present)
    assert is_tidy(left)
    assert covers(present, wanted) == (bytes_of(wanted) <= bytes_of(present))


@given(SPANS, st.sampled_from([0.0, SURPLUS_SHARE, 0.3, 1.0]))
def test_joining_neighbours_stays_within_its_surplus(wanted: list[Span], share: float):
    """All that is wanted, at most the surplus beside it, and never more requests than before."""
    joined = coalesce(wanted, share)
    assert bytes_of(joined) >= bytes_of(wanted)
    assert total_bytes(joined) <= (1 + share) * len(bytes_of(wanted))
    assert len(joined) <= len(merge(wanted))
    assert is_tidy(joined)


@given(SPANS)
def test_the_smallest_gaps_are_bridged(wanted: list[Span]):
    """No gap that is left is smaller than one that was bridged."""
    joined, before = coalesce(wanted, 0.5), merge(wanted)
    gaps = [Span(a.end, b.start) for a, b in pairwise(before)]
    bridged = [gap.nbytes for gap in gaps if bytes_of([gap]) <= bytes_of(joined)]
    left = [gap.nbytes for gap in gaps if not bytes_of([gap]) <= bytes_of(joined)]
    assert max(bridged, default=0) <= min(left, default=FILE_BYTES)


@given(SPANS, st.integers(1, 70))
def test_pieces_are_small_and_the_same_bytes(spans: list[Span], piece_bytes: int):
    """Cut wherever a piece is full."""
    merged = merge(spans)
    pieces = cut(merged, piece_bytes)
    assert bytes_of(pieces) == bytes_of(spans)
    assert is_tidy(pieces)
    assert all(piece.nbytes <= piece_bytes for piece in pieces)
    assert len(pieces) == sum(-(-span.nbytes // piece_bytes) for span in merged)
