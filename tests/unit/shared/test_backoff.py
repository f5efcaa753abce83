"""Back-off: growing, bounded, jittered by the generator it is given."""

from __future__ import annotations

from random import Random

import pytest

from shared.backoff import Backoff


def test_delays_double_up_to_the_bound_and_stay_in_their_upper_half():
    """Each delay lies between half its bound and its bound."""
    backoff = Backoff(Random(1), first_s=1.0, max_s=5.0)
    for bound_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        assert bound_s / 2 <= backoff.next_delay_s() <= bound_s


def test_a_success_starts_again_from_the_first_bound():
    """After `reset` the next delay is short again."""
    backoff = Backoff(Random(1), first_s=0.1, max_s=100.0)
    for _ in range(20):
        backoff.next_delay_s()
    backoff.reset()
    assert backoff.next_delay_s() <= 0.1


def test_the_jitter_is_the_generators():
    """The same seed gives the same delays, another seed others."""
    first, again, other = (Backoff(Random(seed)) for seed in (1, 1, 2))
    delays = [[b.next_delay_s() for _ in range(4)] for b in (first, again, other)]
    assert delays[0] == delays[1] != delays[2]


@pytest.mark.parametrize("bounds", [{"first_s": 0.0}, {"first_s": 9.0, "max_s": 1.0}, {"factor": 0.5}])
def test_impossible_bounds_are_our_own_fault(bounds: dict[str, float]):
    """A back-off that could not wait or would shrink is a `ValueError`."""
    with pytest.raises(ValueError, match="back-off"):
        Backoff(Random(1), **bounds)
