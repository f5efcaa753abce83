"""What each hop was given, kept so that a hop that lost its cache can be given it again.

Theory of operation. A hop's journal and the position of that hop are one thing: `length` is how many
positions have *entered* the hop, and the journal is their content. The rule that keeps the two together:

    An input enters the journal before it is first sent, and it is never taken out on its own.

So a step that fails needs no rollback: whatever went wrong (a miss, a lost link, a deadline), the hop
must end up having consumed exactly the journal, and replaying the journal gives the answer that the
failed step owed. What a node has *confirmed* is kept apart (`session.HopState.held_len`); between
confirmed and entered lies the one step in flight. A journal starts again at 0 only when the inputs
themselves are produced anew by a replay of an earlier hop.

Content is what came off the wire: a `WireTensor` is a view into the frame that carried it, so nothing
is copied when it enters, and the whole frame is what it costs. Over the budget the largest journal
(those that a stateless hop reads at every step last) loses its content, never its length, and that hop
is then replayed from the nearest earlier hop whose journal is whole, at worst from the token ids, which
are always kept.

The copies of a forked session share the pieces that had entered before; the budget counts such a piece once, for as
long as any of them keeps it.

Joining pieces for a replay needs to know which axis counts positions. Transformers' convention is
``[batch, positions, hidden]`` and the batch is 1 here, so for rank 3 it is axis 1. For any other rank
the axis must follow from the pieces: the only one whose size is the number of positions in every piece
while all other sizes agree. Where that leaves no axis or several, the journal counts as dropped.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Protocol

from shared.tensor_spec import WireTensor

PIECE_OVERHEAD_BYTES = 400
"""What Python objects cost beside the frame itself: a bytes header, two views, a tensor, a list slot."""
BATCHED_RANK = 3
POSITION_AXIS = 1


@dataclass(frozen=True, slots=True)
class StepInput:
    """What enters a hop with one step: `new_len` positions under the name that frames use."""

    name: str
    tensor: WireTensor
    new_len: int

    def tensors(self) -> dict[str, WireTensor]:
        """As the payload of a frame."""
        return {self.name: self.tensor}


class HopInputs(Protocol):
    """The journal of one hop."""

    @property
    def length(self) -> int:
        """Positions that have entered the hop."""
        ...

    def append(self, entering: StepInput) -> None:
        """Let an input enter."""
        ...

    def restart(self) -> None:
        """Start again at position 0: the inputs are about to be produced anew."""
        ...

    def holds(self, length: int) -> bool:
        """Whether exactly `length` positions have entered and all of them can be replayed."""
        ...

    def batches(self, tokens_max: int) -> Iterator[StepInput]:
        """Everything that has entered, in steps of at most `tokens_max` positions where pieces allow it.

        The last one contains at least the whole input that entered last. What is yielded is fixed at
        the call: later changes of the journal do not touch it.
        """
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class IdInputs:
    """The first hop's journal: a length into the session's token ids, which are always kept.

    Args:
        ids: The session's ids; shared with it and only ever extended, or cut back with `restart`.
        length: How many of them have entered.
    """

    def __init__(self, ids: array[int], length: int = 0) -> None:
        self._ids = ids
        self._length = length
        self._last_len = 0

    @property
    def length(self) -> int:
        """Positions that have entered."""
        return self._length

    def append(self, entering: StepInput) -> None:
        """Let ids enter that the session already holds."""
        self._length += entering.new_len
        self._last_len = entering.new_len

    def restart(self) -> None:
        """Start again at position 0."""
        self._length = 0

    def holds(self, length: int) -> bool:
        """Whether exactly `length` positions have entered."""
        return self._length == length

    def batches(self, tokens_max: int) -> Iterator[StepInput]:
        """The ids in steps of `tokens_max`; the first takes the remainder, so the last one is whole."""
        size = max(tokens_max, self._last_len)
        ends = list(range(self._length, 0, -size))[::-1]
        starts = [0, *ends[:-1]]
        return (ids_input(self._ids[start:end]) for start, end in zip(starts, ends, strict=True))

    def close(self) -> None:
        """Nothing to give back: the ids are the session's."""


class Journal:
    """All tensor journals of a gateway, within one byte budget.

    Args:
        bytes_max: Over it, the largest journal loses its content, then the next.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.nbytes = 0
        self.drops = 0
        self._open: dict[TensorInputs, None] = {}
        self._sharers: dict[int, int] = {}  # pieces in more than one journal, by identity

    def open(self, kept: _Kept | None = None) -> TensorInputs:
        """A new journal for one hop, empty, or with what another one keeps as well; its owner closes it."""
        kept = kept or _Kept()
        for piece in kept.pieces:
            self._sharers[id(piece)] = self._sharers.get(id(piece), 1) + 1
        inputs = TensorInputs(self, kept)
        self._open[inputs] = None
        return inputs

    def count(self, nbytes: int) -> None:
        """Account for bytes gained, and drop journals while over the budget."""
        self.nbytes += nbytes
        while self.nbytes > self.bytes_max:
            largest = max(
                self._open, key=lambda inputs: (inputs.nbytes > 0 and not inputs.read_each_step, inputs.nbytes)
            )
            self.drops += 1
            largest.drop()

    def forget(self, inputs: TensorInputs) -> None:
        """Called by a journal that is closed."""
        self._open.pop(inputs, None)

    def give_up(self, pieces: Iterable[StepInput]) -> None:
        """A journal keeps these pieces no longer; those that no other keeps are counted off."""
        self.nbytes -= sum(_cost_bytes(piece) for piece in pieces if not self._is_kept(piece))

    def _is_kept(self, piece: StepInput) -> bool:
        sharers = self._sharers.pop(id(piece), 1) - 1
        if sharers > 1:
            self._sharers[id(piece)] = sharers
        return sharers > 0


class TensorInputs:
    """The journal of a hop that is fed by another hop. Made by `Journal.open`.

    `nbytes` is what its pieces cost, shared ones included: what it would free if it were the last to keep them.
    """

    def __init__(self, journal: Journal, kept: _Kept) -> None:
        self.nbytes = sum(map(_cost_bytes, kept.pieces))
        self.read_each_step = False
        self._journal = journal
        self._kept = kept

    @property
    def length(self) -> int:
        """Positions that have entered, kept or not."""
        return self._kept.length

    def copy(self) -> TensorInputs:
        """The same pieces, which both share from now on."""
        copied = self._journal.open(self._kept.copy())
        copied.read_each_step = self.read_each_step
        return copied

    def append(self, entering: StepInput) -> None:
        """Let hidden states enter; keeps a reference, so the frame that carried them stays alive."""
        kept = self._kept
        kept.length += entering.new_len
        if kept.is_dropped:
            return
        kept.layout.narrow(entering.tensor, entering.new_len)
        kept.pieces.append(entering)
        cost_bytes = _cost_bytes(entering)
        self.nbytes += cost_bytes
        self._journal.count(cost_bytes)

    def restart(self) -> None:
        """Start again at position 0, whole again if the journal had been dropped."""
        self.drop()
        self._kept = _Kept()

    def drop(self) -> None:
        """Lose the content but not the length."""
        pieces = self._kept.pieces
        self._kept = _Kept(length=self._kept.length, is_dropped=True)
        self.nbytes = 0
        self._journal.give_up(pieces)

    def holds(self, length: int) -> bool:
        """Whether exactly `length` positions have entered and their content is here and can be joined."""
        kept = self._kept
        if kept.is_dropped or kept.length != length:
            return False
        return len(kept.pieces) == 1 or kept.layout.axis is not None

    def batches(self, tokens_max: int) -> Iterator[StepInput]:
        """Whole pieces joined up to `tokens_max` positions; a longer piece goes alone."""
        axis = self._kept.layout.axis
        return (_join(pieces, axis) for pieces in _batch(self._kept.pieces, tokens_max))

    def close(self) -> None:
        """Give the memory back and leave the budget."""
        self.drop()
        self._journal.forget(self)


@dataclass(slots=True)
class _Layout:
    """Finds the axis that counts positions, narrowing with every piece."""

    first: WireTensor | None = None
    candidates: tuple[int, ...] = ()

    def narrow(self, tensor: WireTensor, new_len: int) -> None:
        if self.first is None:
            self.first = tensor
            self.candidates = position_axes(tensor.shape, new_len)
        elif self.candidates:
            first = self.first
            self.candidates = tuple(axis for axis in self.candidates if _continues(tensor, first, axis, new_len))

    @property
    def axis(self) -> int | None:
        return self.candidates[0] if len(self.candidates) == 1 else None


@dataclass(slots=True)
class _Kept:
    """What has entered one hop, as far as it is still here."""

    length: int = 0
    is_dropped: bool = False
    pieces: list[StepInput] = field(default_factory=list)
    layout: _Layout = field(default_factory=_Layout)

    def copy(self) -> _Kept:
        return replace(self, pieces=list(self.pieces), layout=replace(self.layout))


def position_axes(shape: tuple[int, ...], new_len: int) -> tuple[int, ...]:
    """The axes of hidden states of this shape that may count its positions; none where it is not of so many."""
    if len(shape) == BATCHED_RANK and shape[0] == 1:
        return (POSITION_AXIS,) if shape[POSITION_AXIS] == new_len else ()
    return tuple(axis for axis, size in enumerate(shape) if size == new_len)


def _continues(tensor: WireTensor, first: WireTensor, axis: int, new_len: int) -> bool:
    shape = tensor.shape
    return (
        len(shape) == len(first.shape)
        and shape[axis] == new_len
        and shape[:axis] == first.shape[:axis]
        and shape[axis + 1 :] == first.shape[axis + 1 :]
        and tensor.dtype == first.dtype
    )


def _batch(pieces: Sequence[StepInput], tokens_max: int) -> list[list[StepInput]]:
    batches: list[list[StepInput]] = []
    room = 0
    for piece in pieces:
        if piece.new_len > room or not batches:
            batches.append([])
            room = tokens_max
        batches[-1].append(piece)
        room -= piece.new_len
    return batches


def _join(pieces: Sequence[StepInput], axis: int | None) -> StepInput:
    """One input of several pieces: bytes joined once, along the axis that counts positions."""
    if len(pieces) == 1 or axis is None:
        return pieces[0]
    first = pieces[0].tensor
    new_len = sum(piece.new_len for piece in pieces)
    shape = (*first.shape[:axis], new_len, *first.shape[axis + 1 :])
    data = _concatenate([piece.tensor.data for piece in pieces], prod(first.shape[:axis]))
    return StepInput(pieces[0].name, WireTensor(first.dtype, shape, memoryview(data)), new_len)


def _concatenate(buffers: Sequence[memoryview], rows: int) -> bytes:
    """Join C-contiguous buffers of `rows` equal rows each, row by row; with one row that is plain joining."""
    if rows == 1:
        return b"".join(buffers)
    widths = [buffer.nbytes // rows for buffer in buffers]
    return b"".join(
        buffer[row * width : (row + 1) * width]
        for row in range(rows)
        for buffer, width in zip(buffers, widths, strict=True)
    )


def _cost_bytes(piece: StepInput) -> int:
    return _frame_bytes(piece.tensor) + PIECE_OVERHEAD_BYTES


def _frame_bytes(tensor: WireTensor) -> int:
    """Bytes that a view keeps alive: the whole frame it points into."""
    owner = tensor.data.obj
    return len(owner) if isinstance(owner, bytes | bytearray) else tensor.data.nbytes


def ids_input(ids: array[int]) -> StepInput:
    """Token ids as the first hop takes them: ``i32 [1, new_len]``. The array must not change afterwards."""
    if sys.byteorder == "big":
        ids = array("i", ids)
        ids.byteswap()
    return StepInput("token_ids", WireTensor("i32", (1, len(ids)), memoryview(ids).cast("B")), len(ids))
