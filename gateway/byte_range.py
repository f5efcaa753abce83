"""Which bytes of a file a Range header asks for (RFC 9110, section 14). Pure."""

from __future__ import annotations

import re

from shared.models.spans import Span

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class RangeNotSatisfiable(Exception):
    """The file has none of the bytes asked for."""


def parse_range(header: str | None, size_bytes: int) -> Span | None:
    """The bytes asked for, cut to the file's end; None for the whole file.

    A header that is malformed, of another unit or of several ranges is ignored, as the RFC allows.

    Raises:
        RangeNotSatisfiable: It is well-formed and begins after the end.
    """
    match = _RANGE.fullmatch(header or "")
    if match is None or match[0] == "bytes=-":
        return None
    first, last = match[1], match[2]
    if not first:
        start, end = max(0, size_bytes - int(last)), size_bytes
    else:
        start, end = int(first), min(int(last) + 1, size_bytes) if last else size_bytes
        if last and int(last) < start:
            return None
    if start >= size_bytes or start == end:
        raise RangeNotSatisfiable
    return Span(start, end)
