"""How a node's places are divided between gateways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard.shares import Claim, divide_places

CLAIMS = st.dictionaries(st.integers(0, 9), st.integers(0, 20), max_size=6)


@pytest.mark.parametrize(
    ("places", "claims", "expected"),
    [
        (8, {"a": Claim(0)}, {"a": 8}),
        (8, {"a": Claim(20)}, {"a": 8}),
        (8, {"a": Claim(20, 8), "b": Claim(0)}, {"a": 8, "b": 0}),
        (8, {"a": Claim(7, 8), "b": Claim(20)}, {"a": 7, "b": 1}),
        (8, {"a": Claim(20), "b": Claim(20)}, {"a": 4, "b": 4}),
        (8, {"a": Claim(2, 8), "b": Claim(20, 0)}, {"a": 2, "b": 6}),
        (8, {"a": Claim(0), "b": Claim(0)}, {"a": 4, "b": 4}),
        (1, {"a": Claim(3, 1), "b": Claim(3)}, {"a": 1, "b": 0}),
        (1, {"a": Claim(0, 1), "b": Claim(3)}, {"a": 0, "b": 1}),
        (0, {"a": Claim(3)}, {"a": 0}),
    ],
)
def test_places_are_divided_fairly(places: int, claims: dict[str, Claim], expected: dict[str, int]):
    """Alone, full, newly come, equally greedy, modest: what each is granted."""
    assert divide_places(places, claims) == expected


def test_nothing_claimed_is_nothing_granted():
    """A node without gateways grants nothing."""
    assert divide_places(8, {}) == {}


@given(places=st.integers(0, 12), wanted=st.lists(CLAIMS, min_size=1, max_size=6))
def test_grants_never_exceed_places_and_take_nothing_that_runs(places: int, wanted: list[dict[int, int]]):
    """Over any sequence of wishes and gateways: the sum holds, and a running session's place is kept."""
    grants: dict[int, int] = {}
    for wishes in wanted:
        claims = {key: Claim(wish, grants.get(key, 0)) for key, wish in wishes.items()}
        running = {key: min(claim.wanted, claim.granted) for key, claim in claims.items()}
        grants = divide_places(places, claims)
        assert sum(grants.values()) <= places
        assert all(grants[key] >= running[key] for key in claims)


@given(places=st.integers(1, 40), wishes=st.dictionaries(st.integers(0, 9), st.integers(0, 40), min_size=1, max_size=6))
def test_a_fresh_division_is_max_min_fair(places: int, wishes: dict[int, int]):
    """Whoever is granted less than wanted is granted no less than any other, but for one odd place."""
    grants = divide_places(places, {key: Claim(wish) for key, wish in wishes.items()})
    for key, wish in wishes.items():
        if grants[key] < wish:
            assert all(grants[key] >= other - 1 for other in grants.values())


@given(places=st.integers(1, 40), wishes=st.dictionaries(st.integers(0, 9), st.integers(0, 40), min_size=1, max_size=6))
def test_nothing_is_left_idle_while_somebody_waits(places: int, wishes: dict[int, int]):
    """All places are granted."""
    assert sum(divide_places(places, {key: Claim(wish) for key, wish in wishes.items()}).values()) == places
