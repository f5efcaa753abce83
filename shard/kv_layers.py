"""The slots of a session's cache that this project makes better than transformers' own.

Slots are addressed by absolute layer index, as the model's layers do. Per slot:

==================  ===============================================================================
full attention      `GrowingLayer`: appends in place, grows geometrically, hands out views
sliding / chunked   `WindowLayer`: the same within the window, and the few positions that a rewind goes back
full, with indexer  `IndexedLayer`: transformers' own, which can go back
any other kind      transformers' own object, opaque: linear attention, compressed
outside the range   `AbsentLayer`: holds nothing
==================  ===============================================================================

Shapes: B = batch (1 here), H = key/value heads, T = positions, D = head size.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from shard.transformers_compat import DummyLayer

CAPACITY_MIN = 256
"""Positions a slot has room for at first: a short chat never grows."""
WINDOW_SLACK = 64
"""Positions that a window slot has room for beside its window."""
REWIND_KEPT = 16
"""Of these, how many are kept of those that have left the window: so far it can go back. One move in 48 steps."""


class PositionBuffer:
    """A tensor ``[B, H, capacity, D]`` that positions are written into, with room to spare.

    Args:
        capacity_max: Never allocate more positions than these; None grows by half each time.
    """

    def __init__(self, capacity_max: int | None = None) -> None:
        self._capacity_max = capacity_max
        self._data: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self._data is None else self._data.nbytes

    def write(self, states_BHTD: torch.Tensor, start: int) -> None:  # noqa: N803 - shape suffix
        """Put positions at ``[start, start + T)``; what lies before `start` stays."""
        new_len = states_BHTD.shape[-2]
        data = self._with_room(states_BHTD, start, start + new_len)
        data.narrow(-2, start, new_len).copy_(states_BHTD)

    def view(self, start: int, length: int) -> torch.Tensor:
        """The positions ``[start, start + length)``, without a copy."""
        return cast(torch.Tensor, self._data).narrow(-2, start, length)

    def move_to_front(self, start: int, length: int) -> None:
        """Move ``[start, start + length)`` to ``[0, length)``."""
        self.view(0, length).copy_(self.view(start, length).clone())  # they may overlap

    def _with_room(self, like: torch.Tensor, kept: int, needed: int) -> torch.Tensor:
        old = self._data
        capacity = 0 if old is None else old.shape[-2]
        if old is not None and needed <= capacity:
            return old
        wanted = max(needed, capacity + capacity // 2, CAPACITY_MIN)
        if self._capacity_max is not None:
            wanted = max(needed, min(wanted, self._capacity_max))
        self._data = like.new_empty((*like.shape[:-2], wanted, like.shape[-1]))
        if old is not None and kept:
            self._data.narrow(-2, 0, kept).copy_(old.narrow(-2, 0, kept))
        return self._data


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Full attention: a step copies only what is new, and attention reads views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._length = 0
        self._key_buffer, self._value_buffer = PositionBuffer(), PositionBuffer()

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._key_buffer.nbytes + self._value_buffer.nbytes

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new positions; gives all that are held."""
        start = self._length
        self._key_buffer.write(key_states, start)
        self._value_buffer.write(value_states, start)
        return self._hold(start + key_states.shape[-2])

    def get_seq_length(self) -> int:
        """Positions held."""
        return self._length

    def can_truncate(self, _length: int) -> bool:
        """Always."""
        return True

    def truncate(self, length: int) -> None:
        """Drop the positions from `length` on."""
        if length < self._length:
            self._hold(length)

    def _hold(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._length = length
        self.keys, self.values = self._key_buffer.view(0, length), self._value_buffer.view(0, length)
        self.is_initialized = True
        return self.keys, self.values


class WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """Sliding window: keeps the last `window - 1` positions, all that a later position can see, and a few before.

    A few new positions are appended in place behind the window. More at a time (a chunk of a prefill) are joined with
    the window in a temporary that attention reads. What stands in the buffers before the window are the positions that
    came before it: those that it has moved past, at least `REWIND_KEPT` of them.
    """

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self._kept_max = sliding_window - 1
        self._capacity_max = self._kept_max + WINDOW_SLACK
        self._key_buffer, self._value_buffer = PositionBuffer(self._capacity_max), PositionBuffer(self._capacity_max)
        self._start, self._held = 0, 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._key_buffer.nbytes + self._value_buffer.nbytes

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new positions; gives the window before them followed by them."""
        new_len = key_states.shape[-2]
        is_short = new_len <= WINDOW_SLACK - REWIND_KEPT
        keys, values = (self._append if is_short else self._join)(key_states, value_states)
        self.cumulative_length += new_len
        self._expose()
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length, and position of the first, of what `update` gives for `query_length` new positions."""
        return self._held + query_length, self.cumulative_length - self._held

    def can_truncate(self, length: int) -> bool:
        """Whether the window that ended at `length` still stands in the buffers."""
        return self._start_of_window(length) >= 0

    def truncate(self, length: int) -> None:
        """Drop the positions from `length` on, which `can_truncate` allows."""
        if length >= self.cumulative_length:
            return
        self._start = self._start_of_window(length)
        self._held, self.cumulative_length = min(length, self._kept_max), length
        self._expose()

    def _start_of_window(self, length: int) -> int:
        """Where the window that ends at `length` begins in the buffers; negative where that is gone."""
        if length >= self.cumulative_length:
            return self._start
        end = self._start + self._held - (self.cumulative_length - length)
        return end - min(length, self._kept_max)

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = self._held + key_states.shape[-2]
        if self._start + total > self._capacity_max:
            before = min(self._start, REWIND_KEPT)
            for buffer in (self._key_buffer, self._value_buffer):
                buffer.move_to_front(self._start - before, before + self._held)
            self._start = before
        self._key_buffer.write(key_states, self._start + self._held)
        self._value_buffer.write(value_states, self._start + self._held)
        keys, values = self._key_buffer.view(self._start, total), self._value_buffer.view(self._start, total)
        self._held = min(total, self._kept_max)
        self._start += total - self._held
        return keys, values

    def _join(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._held:
            key_states = torch.cat((self._key_buffer.view(self._start, self._held), key_states), dim=-2)
            value_states = torch.cat((self._value_buffer.view(self._start, self._held), value_states), dim=-2)
        total = key_states.shape[-2]
        kept = min(total, self._kept_max + REWIND_KEPT)
        self._held = min(total, self._kept_max)
        self._start = kept - self._held
        self._key_buffer.write(key_states.narrow(-2, total - kept, kept), 0)
        self._value_buffer.write(value_states.narrow(-2, total - kept, kept), 0)
        return key_states, value_states

    def _expose(self) -> None:
        self.keys = self._key_buffer.view(self._start, self._held)
        self.values = self._value_buffer.view(self._start, self._held)
        self.is_initialized = True


class IndexedLayer(DynamicIndexedLayer):  # type: ignore[no-untyped-call]
    """Full attention with an indexer's keys ``[1, T, D]`` beside: transformers' own, which joins tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def can_truncate(self, _length: int) -> bool:
        """Always."""
        return True

    def truncate(self, length: int) -> None:
        """Drop the positions from `length` on; a layer may have keys for its indexer alone, or none."""
        if self.keys is not None and self.values is not None and length < self.keys.shape[-2]:
            self.keys, self.values = self.keys.narrow(-2, 0, length), self.values.narrow(-2, 0, length)
        if self.indexer_keys is not None and length < self.indexer_keys.shape[1]:
            self.indexer_keys = self.indexer_keys.narrow(1, 0, length)


class AbsentLayer(DummyLayer):  # type: ignore[misc] # Any: the library's or ours
    """The slot of a layer that another node holds.

    It has the fields of the empty slot that it stands for: models look at them, and some keep there what concerns all
    layers (positions, for an indexer); then it is not as empty as it looks.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        # without the tensors that some have from the start, so that what is there later was put there
        fields = vars(original).items()
        self.__dict__.update({name: value for name, value in fields if not isinstance(value, torch.Tensor)})
