"""How a node's places are divided between gateways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard.shares import Claim, Shares, divide_places

WISHES = st.dictionaries(st.integers(0, 9), st.integers(0, 40), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("places", "claims", "expected"),
    [
        (8, {"a": Claim()}, {"a": 8}),
        (8, {"a": Claim(waiting=20)}, {"a": 8}),
        (8, {"a": Claim(held=8, waiting=12, granted=8), "b": Claim()}, {"a": 8, "b": 0}),
        (8, {"a": Claim(held=7, granted=8), "b": Claim(waiting=20)}, {"a": 7, "b": 1}),
        (8, {"a": Claim(waiting=20), "b": Claim(waiting=20)}, {"a": 4, "b": 4}),
        (8, {"a": Claim(waiting=20, granted=8), "b": Claim(waiting=20)}, {"a": 4, "b": 4}),
        (8, {"a": Claim(held=2, granted=8), "b": Claim(waiting=20)}, {"a": 2, "b": 6}),
        (8, {"a": Claim(), "b": Claim()}, {"a": 4, "b": 4}),
        (1, {"a": Claim(held=1, waiting=2, granted=1), "b": Claim(waiting=3)}, {"a": 1, "b": 0}),
        (1, {"a": Claim(granted=1), "b": Claim(waiting=3)}, {"a": 0, "b": 1}),
        (0, {"a": Claim(waiting=3)}, {"a": 0}),
    ],
)
def test_places_are_divided_fairly(places: int, claims: dict[str, Claim], expected: dict[str, int]):
    """Alone, full, newly come, equally greedy, holding back what it does not use, modest: what each is granted."""
    assert divide_places(places, claims) == expected


def test_nothing_claimed_is_nothing_granted():
    """A node without gateways grants nothing."""
    assert divide_places(8, {}) == {}


@given(places=st.integers(1, 40), wishes=WISHES)
def test_a_fresh_division_is_max_min_fair(places: int, wishes: dict[int, int]):
    """Whoever is granted less than wanted is granted no less than any other, but for one odd place."""
    grants = divide_places(places, {key: Claim(waiting=wish) for key, wish in wishes.items()})
    for key, wish in wishes.items():
        if grants[key] < wish:
            assert all(grants[key] >= other - 1 for other in grants.values())


@given(places=st.integers(1, 40), wishes=WISHES)
def test_nothing_is_left_idle_while_somebody_waits(places: int, wishes: dict[int, int]):
    """All places are granted."""
    assert sum(divide_places(places, {key: Claim(waiting=wish) for key, wish in wishes.items()}).values()) == places


def test_a_place_is_granted_again_only_when_its_gateway_knows_that_it_is_lost():
    """The sum of what gateways believe to have is never more than there is."""
    shares = Shares()
    assert shares.ask("a", 0, 8, 8) == 8
    assert shares.ask("b", 0, 8, 8) == 0
    assert shares.ask("a", 8, 0, 8) == 8  # it has begun them all
    assert shares.ask("b", 0, 8, 8) == 0
    assert shares.ask("a", 3, 0, 8) == 3  # five of its sessions have ended
    assert shares.ask("b", 0, 8, 8) == 5
    shares.forget("a")
    assert shares.ask("b", 5, 3, 8) == 8


def test_two_nodes_that_were_asked_in_other_orders_come_to_the_same():
    """Neither gateway may end with all of one node and nothing of the other: a session needs both."""
    nodes = {"first": Shares(), "second": Shares()}
    orders = {"first": "ab", "second": "ba"}
    for _ in range(3):
        grants = {node: {key: shares.ask(key, 0, 8, 4) for key in orders[node]} for node, shares in nodes.items()}
    assert grants == {"first": {"a": 2, "b": 2}, "second": {"a": 2, "b": 2}}


ASKED = st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 20), st.booleans())


@given(places=st.integers(0, 12), asked=st.lists(ASKED, max_size=30))
def test_what_gateways_were_told_never_exceeds_what_there_is(places: int, asked: list[tuple[int, int, int, bool]]):
    """Whoever asks and leaves, in whatever order; and no session that runs within a grant loses its place."""
    shares, told = Shares(), {}
    for gateway, held, waiting, leaves in asked:
        running = min(held, told.get(gateway, 0))
        told[gateway] = shares.ask(gateway, running, waiting, places)
        assert running <= told[gateway]
        assert sum(told.values()) <= places
        if leaves:
            shares.forget(gateway)
            del told[gateway]
