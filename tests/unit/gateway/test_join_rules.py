"""Who may join: attempts per address and in all, connections without a token, and who wins an id."""

from __future__ import annotations

import pytest

from gateway.join_rules import (
    JOIN_WINDOW_S,
    JOINS_MAX,
    JOINS_PER_ADDRESS_MAX,
    QUIET_S,
    REPLACED_EVERY_S,
    UNPROVEN_MAX,
    Holder,
    JoinGate,
    may_replace,
)


def try_joins(gate: JoinGate, host: str, count: int, now_s: float = 0.0) -> None:
    """Attempts that are over at once."""
    for _ in range(count):
        assert gate.enter(host, now_s) is None
        gate.leave()


def test_an_address_may_try_so_often_in_a_minute():
    """Another address is not its victim, and a minute later it may try again."""
    gate = JoinGate()
    try_joins(gate, "a", JOINS_PER_ADDRESS_MAX)
    refusal = gate.enter("a", JOIN_WINDOW_S - 1)
    assert refusal is not None
    assert (refusal.status, refusal.headers["retry-after"]) == (429, "1")
    try_joins(gate, "b", 1)
    try_joins(gate, "a", 1, JOIN_WINDOW_S)


def test_all_addresses_together_may_try_so_often():
    """However many there are."""
    gate = JoinGate()
    for number in range(JOINS_MAX):
        try_joins(gate, f"h{number}", 1)
    refusal = gate.enter("another", 0.0)
    assert refusal is not None
    assert refusal.status == 429


def test_so_many_may_be_silent_at_once():
    """Each that shows its token, or leaves, makes room for another."""
    gate = JoinGate()
    for number in range(UNPROVEN_MAX):
        assert gate.enter(f"h{number}", 0.0) is None
    refusal = gate.enter("late", 0.0)
    assert refusal is not None
    assert refusal.status == 503
    gate.leave()
    assert gate.enter("late", 0.0) is None


@pytest.mark.parametrize(
    ("holder", "replaced"),
    [
        pytest.param(Holder(host="a", pid=7, held_s=60.0), True, id="the same process"),
        pytest.param(Holder(host="a", held_s=60.0), True, id="a machine without a range says no process"),
        pytest.param(Holder(host="a", pid=8, held_s=60.0), False, id="another process of the machine"),
        pytest.param(Holder(host="b", pid=7, held_s=60.0), False, id="another machine"),
        pytest.param(Holder(host="b", pid=8, quiet_s=QUIET_S), True, id="one that may be dead"),
        pytest.param(Holder(host="a", pid=7, held_s=REPLACED_EVERY_S - 1), False, id="it has only just replaced one"),
        pytest.param(Holder(host="a", pid=7, quiet_s=60.0, dialled=True), False, id="one that the gateway dials"),
    ],
)
def test_who_has_an_id_keeps_it_while_alive(holder: Holder, replaced: bool):
    """Two machines that were given the same id must not take it from each other."""
    assert may_replace(holder, Holder(host="a", pid=7)) is replaced
