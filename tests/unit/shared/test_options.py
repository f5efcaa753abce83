"""What all commands read alike."""

from __future__ import annotations

import pytest

from shared.options import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512M", 512 << 20), ("2g", 2 << 30), ("3 KiB", 3072), ("1TB", 1 << 40), ("77B", 77)],
)
def test_sizes_are_powers_of_1024(text: str, size: int) -> None:
    """Plain numbers and the usual suffixes."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5G", "many", "1X", "G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """Also zero: a budget of nothing is `--no-kv-cache`."""
    with pytest.raises(ValueError, match="number of bytes above 0"):
        parse_bytes(text)
