"""The token ids at a session's positions, for draws that depend on what came before.

The ids stand in one growing buffer. How many of them count is the session's own length, so they move with the
position: what a failed step has written lies beyond it, and the next step writes over it.
"""

from __future__ import annotations

from array import array

from shared.tensor_spec import WireTensor

CAPACITY_MIN = 256
"""Ids a history has room for at first; from there it doubles."""
_ITEM_CODES = {"i32": "i", "i64": "q"}


class TokenHistory:
    """Ids of positions 0 onwards. For the compute thread alone."""

    def __init__(self) -> None:
        self._ids = array("i")

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return len(self._ids) * self._ids.itemsize

    def write(self, start: int, token_ids: WireTensor) -> memoryview:
        """Put ids at ``[start, start + new_len)``; gives those from 0 to there, as a view of 32-bit integers.

        Args:
            start: Positions that come before; they stay.
            token_ids: ``[1, new_len]`` of `i32` or `i64`, every id within 32 bits: checked before.
        """
        new_ids = array(_ITEM_CODES[token_ids.dtype])
        new_ids.frombytes(token_ids.data)
        end = start + len(new_ids)
        if end > len(self._ids):
            self._grow(start, end)
        ids = memoryview(self._ids)
        ids[start:end] = array("i", new_ids)
        return ids[:end]

    def copy(self, length: int) -> TokenHistory:
        """A history of its own, with the first `length` ids."""
        other = TokenHistory()
        other._grow(0, max(length, CAPACITY_MIN))
        memoryview(other._ids)[:length] = memoryview(self._ids)[:length]
        return other

    def _grow(self, kept: int, needed: int) -> None:
        grown = array("i", bytes(array("i").itemsize * max(needed, 2 * len(self._ids), CAPACITY_MIN)))
        memoryview(grown)[:kept] = memoryview(self._ids)[:kept]
        self._ids = grown  # views of the old one stay valid: an array that is viewed cannot be resized
