"""Byte ranges of a file, and how few requests fetch them. Pure.

A span is ``[start, end)``. Functions that give several give them in order, disjoint and not empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

SURPLUS_SHARE: Final = 0.008
"""Unwanted bytes between neighbours that may be fetched along, as a share of the wanted ones."""


class Span(NamedTuple):
    """Bytes ``[start, end)`` of a file."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many."""
        return self.end - self.start


def merge(spans: Iterable[Span]) -> list[Span]:
    """The same bytes with overlapping and touching spans joined."""
    merged: list[Span] = []
    for span in sorted(span for span in spans if span.nbytes > 0):
        if merged and span.start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def subtract(wanted: Iterable[Span], present: Iterable[Span]) -> list[Span]:
    """What of the wanted bytes is not among those present."""
    left: list[Span] = []
    taken = merge(present)
    for span in merge(wanted):
        start = span.start
        for held in taken:
            if held.end <= start or held.start >= span.end:
                continue
            if held.start > start:
                left.append(Span(start, held.start))
            start = max(start, held.end)
        if start < span.end:
            left.append(Span(start, span.end))
    return left


def total_bytes(spans: Iterable[Span]) -> int:
    """How many bytes the spans have together."""
    return sum(span.nbytes for span in spans)


def coalesce(wanted: Iterable[Span], surplus_share: float = SURPLUS_SHARE) -> list[Span]:
    """Join near neighbours over the gaps between them, smallest gaps first, for as long as the surplus allows.

    Args:
        wanted: What is needed.
        surplus_share: Gaps may add up to this share of the wanted bytes.
    """
    spans = merge(wanted)
    allowance = int(total_bytes(spans) * surplus_share)
    gaps = sorted(Span(before.end, after.start) for before, after in pairwise(spans))
    bridged: list[Span] = []
    for gap in sorted(gaps, key=lambda gap: gap.nbytes):
        if gap.nbytes > allowance:
            break
        allowance -= gap.nbytes
        bridged.append(gap)
    return merge([*spans, *bridged])


def cut(spans: Iterable[Span], piece_bytes: int) -> list[Span]:
    """Pieces of at most `piece_bytes`, one request each."""
    return [
        Span(start, min(start + piece_bytes, span.end))
        for span in spans
        for start in range(span.start, span.end, piece_bytes)
    ]


def covers(present: Iterable[Span], wanted: Sequence[Span]) -> bool:
    """Whether nothing that is wanted is absent."""
    return not subtract(wanted, present)
