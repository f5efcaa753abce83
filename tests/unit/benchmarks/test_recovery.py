"""Which gap between tokens a lost node is blamed for."""

import pytest

from benchmarks.recovery import Kill, Streamed, percentiles, stalls_of

TOKENS_AT = [10.0, 10.2, 10.4, 12.0, 12.2]


def a_kill(recovered_at: float | None, *, killed_at: float = 10.45, way: str = "decode") -> Kill:
    """A kill that was noticed after 50 ms, and whose hop took half a second to rebuild."""
    replayed_at = None if recovered_at is None else recovered_at - 0.5
    return Kill(way, 1, 3, "node-1", killed_at, killed_at + 0.05, replayed_at, recovered_at)


def test_the_stall_is_the_gap_in_which_the_hop_was_rebuilt() -> None:
    """Not the one after the kill: a token that had passed the hop still comes."""
    (stall,) = stalls_of(Streamed(token_ats=TOKENS_AT, sent_at=9.0), [a_kill(11.9, killed_at=10.3)], 1.0)
    assert stall.gap_s == pytest.approx(1.6)
    assert stall.detection_s == pytest.approx(0.05)
    assert stall.prefill_s == pytest.approx(0.5)
    assert stall.beyond_prefill_s == pytest.approx(1.1)


def test_two_hops_that_are_rebuilt_in_one_gap_are_one_stall() -> None:
    """With both prefills in it."""
    (stall,) = stalls_of(Streamed(token_ats=TOKENS_AT, sent_at=9.0), [a_kill(11.2), a_kill(11.9)], 1.0)
    assert stall.prefill_s == pytest.approx(1.0)
    assert stall.ways == ("decode", "decode")


def test_before_the_first_token_the_stall_is_its_delay() -> None:
    """An undisturbed prompt takes its time as well."""
    (stall,) = stalls_of(Streamed(token_ats=TOKENS_AT, sent_at=9.0), [a_kill(9.9, way="prefill")], 0.4)
    assert stall.gap_s == pytest.approx(0.6)


@pytest.mark.parametrize("recovered_at", [None, 12.3])
def test_a_kill_that_no_token_waited_for_is_no_stall(recovered_at: float | None) -> None:
    """The stream had no other step for that hop, or had ended."""
    assert stalls_of(Streamed(token_ats=TOKENS_AT, sent_at=9.0), [a_kill(recovered_at)], 1.0) == []


def test_percentiles_are_of_what_was_seen() -> None:
    """In milliseconds; nothing gives zeros."""
    assert percentiles([0.2, 0.1, 0.3]) == {"p50": 200.0, "p99": 300.0, "max": 300.0}
    assert percentiles([]) == {"p50": 0.0, "p99": 0.0, "max": 0.0}
