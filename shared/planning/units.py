"""Sizes and times as people read them."""

from __future__ import annotations

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
"""Powers of 1,024, as the flags read them."""


def size_text(size: int) -> str:
    """A size in the unit that suits it: ``1.26 GiB``, ``630 MiB``."""
    for unit, scale in _UNITS:
        if abs(size) >= scale:
            value = size / scale
            return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
    return f"{size} bytes"


def duration_text(seconds: float) -> str:
    """A duration in milliseconds, three digits: ``12.3 ms``."""
    value = seconds * 1000
    return f"{value:.0f} ms" if abs(value) >= 100 else f"{value:.3g} ms"
