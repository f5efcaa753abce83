"""What journals keep, what they cost, and how they are joined for a replay."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.journal import PIECE_OVERHEAD_BYTES, IdInputs, Journal, StepInput, TensorInputs, ids_input
from shared.tensor_spec import WireTensor

PLENTY = 1 << 30


def piece(values: Sequence[float], *, hidden: int = 2) -> StepInput:
    """Hidden states ``[1, n, hidden]`` in which each position repeats its value."""
    numbers = [value for value in values for _ in range(hidden)]
    data = memoryview(struct.pack(f"<{len(numbers)}f", *numbers))
    return StepInput("hidden_states", WireTensor("f32", (1, len(values), hidden), data), len(values))


def streams(values: Sequence[float], *, count: int = 3) -> StepInput:
    """Hidden states ``[count, 1, n, 1]``; stream s holds value + 1000 s."""
    numbers = [value + 1000 * stream for stream in range(count) for value in values]
    data = memoryview(struct.pack(f"<{len(numbers)}f", *numbers))
    return StepInput("hidden_states", WireTensor("f32", (count, 1, len(values), 1), data), len(values))


def floats(tensor: WireTensor) -> list[float]:
    """The elements."""
    return list(struct.unpack(f"<{tensor.data.nbytes // 4}f", tensor.data))


def filled(*pieces: StepInput, journal: Journal | None = None) -> TensorInputs:
    """A journal into which these have entered."""
    inputs = (journal or Journal(PLENTY)).open()
    for each in pieces:
        inputs.append(each)
    return inputs


def test_whole_pieces_are_joined_up_to_the_limit() -> None:
    """A replay gets few long steps instead of many short ones, in order and complete."""
    inputs = filled(piece([1, 2, 3]), piece([4]), piece([5]), piece([6]))
    batches = list(inputs.batches(4))
    assert [batch.new_len for batch in batches] == [4, 2]
    assert [batch.tensor.shape for batch in batches] == [(1, 4, 2), (1, 2, 2)]
    assert [floats(batch.tensor)[::2] for batch in batches] == [[1, 2, 3, 4], [5, 6]]


def test_a_piece_over_the_limit_goes_alone() -> None:
    """A hop took it once, so it will take it again."""
    assert [batch.new_len for batch in filled(piece([1, 2, 3]), piece([4])).batches(2)] == [3, 1]


def test_a_single_piece_is_not_copied() -> None:
    """What came off the wire goes back onto it as it is."""
    entered = piece([1, 2])
    (batch,) = filled(entered).batches(8)
    assert batch.tensor is entered.tensor


def test_batches_are_fixed_at_the_call() -> None:
    """A journal dropped in mid-replay does not shorten the replay."""
    inputs = filled(piece([1]), piece([2]))
    batches = inputs.batches(1)
    inputs.drop()
    assert [floats(batch.tensor)[0] for batch in batches] == [1, 2]


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=8), limit=st.integers(1, 9))
def test_batches_hold_everything_once(lengths: list[int], limit: int) -> None:
    """Any pieces under any limit: all positions, in order, and the last batch holds the last piece."""
    values = iter(range(1000))
    inputs = filled(*(piece([next(values) for _ in range(length)]) for length in lengths))
    batches = list(inputs.batches(limit))
    assert [value for batch in batches for value in floats(batch.tensor)[::2]] == list(range(sum(lengths)))
    assert batches[-1].new_len >= lengths[-1]
    assert all(batch.new_len <= max(limit, *lengths) for batch in batches)


def test_the_axis_of_other_ranks_follows_from_pieces_of_different_length() -> None:
    """Several residual streams are joined stream by stream."""
    inputs = filled(streams([1, 2]), streams([3]))
    assert inputs.holds(3)
    (batch,) = inputs.batches(8)
    assert batch.tensor.shape == (3, 1, 3, 1)
    assert floats(batch.tensor) == [1, 2, 3, 1001, 1002, 1003, 2001, 2002, 2003]


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([streams([1]), streams([2])], id="two axes of size 1"),
        pytest.param([streams([1, 2]), piece([3])], id="another rank"),
        pytest.param([piece([1, 2]), piece([3], hidden=4)], id="another width"),
        pytest.param(
            [piece([1]), StepInput("hidden_states", WireTensor("bf16", (1, 1, 2), memoryview(bytes(4))), 1)],
            id="another element type",
        ),
        pytest.param(
            [StepInput("hidden_states", piece([1, 2]).tensor, 1), piece([3])],
            id="an axis that does not count positions",
        ),
    ],
)
def test_pieces_that_cannot_be_joined_for_sure_count_as_dropped(pieces: list[StepInput]) -> None:
    """Rather a full replay than a guess."""
    inputs = filled(*pieces)
    assert not inputs.holds(inputs.length)


def test_one_piece_needs_no_axis() -> None:
    """Nothing to join, nothing to know."""
    assert filled(streams([1])).holds(1)


def test_a_view_costs_the_frame_it_keeps_alive() -> None:
    """The budget counts what memory is really held."""
    frame = bytes(1000)
    tensor = WireTensor("f32", (1, 1, 2), memoryview(frame)[100:108])
    journal = Journal(PLENTY)
    filled(StepInput("hidden_states", tensor, 1), journal=journal)
    assert journal.nbytes == 1000 + PIECE_OVERHEAD_BYTES


def test_over_the_budget_the_largest_loses_its_content_but_not_its_length() -> None:
    """Others stay whole; the dropped one takes in nothing more until it starts again."""
    cost_bytes = 8 + PIECE_OVERHEAD_BYTES
    journal = Journal(3 * cost_bytes)
    large = filled(piece([1]), piece([2]), journal=journal)
    small = filled(piece([1]), journal=journal)
    small.append(piece([2]))
    assert not large.holds(2)
    assert large.length == 2
    assert small.holds(2)
    assert journal.drops == 1
    large.append(piece([3]))
    assert (large.length, large.nbytes) == (3, 0)
    assert journal.nbytes == 2 * cost_bytes


def test_what_a_stateless_hop_reads_each_step_goes_last() -> None:
    """Its loss would cost a full replay per token."""
    cost_bytes = 8 + PIECE_OVERHEAD_BYTES
    journal = Journal(3 * cost_bytes)
    large = filled(piece([1]), piece([2]), journal=journal)
    large.read_each_step = True
    small = filled(piece([1]), journal=journal)
    small.append(piece([2]))
    assert large.holds(2)
    assert not small.holds(2)


def test_a_budget_of_nothing_keeps_nothing() -> None:
    """A journal that alone is over the budget drops itself."""
    journal = Journal(0)
    assert not filled(piece([1]), journal=journal).holds(1)
    assert journal.nbytes == 0


def test_restarting_makes_a_dropped_journal_whole_again() -> None:
    """The inputs are being produced anew, from position 0."""
    journal = Journal(PLENTY)
    inputs = filled(piece([1]), journal=journal)
    inputs.drop()
    inputs.restart()
    inputs.append(streams([1, 2]))
    assert inputs.holds(2)
    inputs.close()
    assert journal.nbytes == 0


def test_a_journal_whose_session_is_over_takes_nothing_in() -> None:
    """An answer that arrives while its session is being closed is not kept for ever."""
    journal = Journal(PLENTY)
    inputs = filled(piece([1]), journal=journal)
    inputs.close()
    inputs.append(piece([2]))
    assert journal.nbytes == 0


def ids_of(batch: StepInput) -> list[int]:
    """The ids in a batch."""
    return list(struct.unpack(f"<{batch.new_len}i", batch.tensor.data))


def test_ids_travel_as_i32() -> None:
    """What the first hop takes."""
    entering = ids_input(array("i", [1, 2]))
    assert (entering.name, entering.tensor.dtype, entering.tensor.shape) == ("token_ids", "i32", (1, 2))
    assert ids_of(entering) == [1, 2]


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), limit=st.integers(1, 9))
def test_id_batches_hold_everything_once(lengths: list[int], limit: int) -> None:
    """The first journal is a window on the ids; its last batch holds at least what entered last."""
    ids = array("i", range(sum(lengths) + 3))
    inputs = IdInputs(ids)
    start = 0
    for length in lengths:
        inputs.append(ids_input(ids[start : start + length]))
        start += length
    assert inputs.holds(start)
    assert not inputs.holds(start + 1)
    batches = list(inputs.batches(limit))
    assert [token for batch in batches for token in ids_of(batch)] == list(range(start))
    assert batches[-1].new_len >= lengths[-1]


def test_id_batches_survive_growing_ids() -> None:
    """A batch is a copy: the session may append while a frame is being sent."""
    ids = array("i", [1, 2, 3])
    inputs = IdInputs(ids)
    inputs.append(ids_input(ids[:3]))
    batches = list(inputs.batches(8))
    ids.append(4)
    assert ids_of(batches[0]) == [1, 2, 3]
    inputs.restart()
    assert inputs.length == 0


def test_copies_share_their_pieces_in_the_budget() -> None:
    """What both keep counts once, until neither keeps it."""
    journal = Journal(1 << 20)
    first = journal.open()
    first.append(piece(range(4)))
    shared_bytes = journal.nbytes
    second, third = first.copy(), first.copy()
    assert journal.nbytes == shared_bytes
    second.append(piece([4]))
    assert [inputs.length for inputs in (first, second, third)] == [4, 5, 4]
    first.close()
    assert journal.nbytes > shared_bytes
    assert third.holds(4)
    second.close()
    assert journal.nbytes == shared_bytes
    third.close()
    assert journal.nbytes == 0


def test_a_copy_goes_on_by_itself() -> None:
    """Restarting one leaves the other whole."""
    journal = Journal(1 << 20)
    first = journal.open()
    first.append(piece(range(4)))
    second = first.copy()
    first.restart()
    first.append(piece([9, 10]))
    second.append(piece([4]))
    (batch,) = second.batches(100)
    assert floats(batch.tensor) == floats(piece(range(5)).tensor)
    assert first.length == 2


def test_over_the_budget_copies_are_dropped_until_their_pieces_are_free() -> None:
    """Dropping one of two frees nothing yet."""
    journal = Journal(1 << 20)
    first = journal.open()
    first.append(piece(range(400)))
    second = first.copy()
    journal.bytes_max = journal.nbytes
    other = journal.open()
    other.append(piece([0]))
    assert not first.holds(400)
    assert not second.holds(400)
    assert other.holds(1)
    assert journal.drops == 2
    assert 0 < journal.nbytes < journal.bytes_max
