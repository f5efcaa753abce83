"""Tokens of several choices on their way to one reader, by value."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from gateway.choice_lanes import LANE_TOKENS_MAX, ChoiceLanes
from gateway.generation_request import Token

COUNT = 3


def take_all(lanes: ChoiceLanes) -> list[Token]:
    """What may be given out now."""
    taken = []
    while (token := lanes.take()) is not None:
        taken.append(token)
    return taken


async def put(lanes: ChoiceLanes, *tokens: Token) -> None:
    """Hand over tokens for which there is room."""
    for token in tokens:
        await lanes.put(token)


@given(
    st.lists(st.tuples(st.sampled_from(["put", "take", "close"]), st.integers(0, COUNT - 1)), max_size=40),
    st.permutations(range(COUNT)),
)
def test_lanes_keep_order_whatever_happens(events: list[tuple[str, int]], rest: list[int]) -> None:
    """Each choice's tokens come in order and once, first tokens in the choices' order, none after a close."""

    async def run() -> list[Token]:
        lanes, given_out, number = ChoiceLanes(COUNT), list[Token](), 0
        closed: set[int] = set()
        for what, choice in events:
            number += 1
            if what == "put" and choice not in closed and lanes.has_room(choice):
                await lanes.put(Token(number, choice))
            elif what == "close":
                lanes.close(choice)
                closed.add(choice)
            elif (token := lanes.take()) is not None:
                assert token.choice not in closed
                given_out.append(token)
        for choice in rest:
            if choice not in closed and lanes.has_room(choice):
                await lanes.put(Token(number := number + 1, choice))
        given_out += take_all(lanes)
        assert lanes.is_empty
        return given_out

    given_out = asyncio.run(run())
    for choice in range(COUNT):
        numbers = [token.id for token in given_out if token.choice == choice]
        assert numbers == sorted(set(numbers))
    begun = list(dict.fromkeys(token.choice for token in given_out))
    assert begun == sorted(begun)


async def test_a_choice_waits_for_those_before_it_to_begin() -> None:
    """And no longer."""
    lanes = ChoiceLanes(COUNT)
    await put(lanes, Token(1, 1), Token(2, 2), Token(3, 2))
    assert lanes.take() is None
    await put(lanes, Token(0, 0))
    assert [token.choice for token in take_all(lanes)] == [0, 1, 2, 2]


async def test_a_choice_does_not_wait_for_one_before_it_that_has_made_nothing() -> None:
    """That one may wait for the end of this one; once it has made something, only the reader is waited for."""
    lanes = ChoiceLanes(COUNT)
    await put(lanes, *(Token(number, 1) for number in range(2 * LANE_TOKENS_MAX)))
    await put(lanes, Token(0, 0))
    assert not lanes.has_room(1)
    assert lanes.has_room(0)
    lanes.take()
    lanes.close(1)
    await put(lanes, *(Token(number, 2) for number in range(LANE_TOKENS_MAX)))
    assert not lanes.has_room(2)


async def test_lanes_are_read_in_turn() -> None:
    """None is starved by one that is always full."""
    lanes = ChoiceLanes(2)
    await put(lanes, *(Token(number, number % 2) for number in range(6)))
    assert [token.choice for token in take_all(lanes)] == [0, 1, 0, 1, 0, 1]


async def test_a_full_lane_makes_its_maker_wait_until_it_is_read() -> None:
    """The others go on."""
    lanes = ChoiceLanes(2)
    await put(lanes, *(Token(number) for number in range(LANE_TOKENS_MAX)))
    waiting = asyncio.ensure_future(lanes.put(Token(99)))
    await put(lanes, Token(0, 1))
    assert not waiting.done()
    lanes.take()
    await waiting
    assert [token.id for token in take_all(lanes) if not token.choice][-1] == 99
