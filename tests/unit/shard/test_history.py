"""The ids of a session move with its position."""

from __future__ import annotations

import struct

import pytest

from shard.history import CAPACITY_MIN, TokenHistory
from shared.tensor_spec import WireTensor
from tests.support.fake_runner import write_ids


def test_ids_are_appended_at_the_position() -> None:
    """Each write gives all that come before it, too."""
    history = TokenHistory()
    assert history.write(0, write_ids([1, 2])).tolist() == [1, 2]
    assert history.write(2, write_ids([3])).tolist() == [1, 2, 3]


def test_what_a_failed_step_wrote_is_written_over() -> None:
    """The length is the session's, so nothing has to be taken back."""
    history = TokenHistory()
    history.write(0, write_ids([1, 2]))
    history.write(2, write_ids([8, 9]))
    assert history.write(2, write_ids([3])).tolist() == [1, 2, 3]


@pytest.mark.parametrize("lengths", [[CAPACITY_MIN, 1], [3 * CAPACITY_MIN + 1], [1] * (2 * CAPACITY_MIN + 1)])
def test_it_grows_and_leaves_views_alone(lengths: list[int]) -> None:
    """A view handed out before still shows what it showed."""
    history, expected = TokenHistory(), list[int]()
    first = history.write(0, write_ids([7]))
    expected.append(7)
    for length in lengths:
        ids = list(range(length))
        view = history.write(len(expected), write_ids(ids))
        expected += ids
    assert view.tolist() == expected
    assert first.tolist() == [7]
    assert history.nbytes < 4 * 3 * max(CAPACITY_MIN, len(expected))


def test_ids_of_64_bits_are_read() -> None:
    """As a first hop reads them."""
    wide = WireTensor("i64", (1, 2), memoryview(struct.pack("<2q", 5, 6)))
    assert TokenHistory().write(0, wide).tolist() == [5, 6]


def test_a_copy_is_its_own() -> None:
    """Neither sees what the other appends."""
    history = TokenHistory()
    history.write(0, write_ids([1, 2, 3]))
    copy = history.copy(2)
    assert copy.write(2, write_ids([9])).tolist() == [1, 2, 9]
    assert history.write(3, write_ids([4])).tolist() == [1, 2, 3, 4]
