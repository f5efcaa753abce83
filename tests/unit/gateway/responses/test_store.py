"""What is kept, for how long, and what is said of what is gone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.openai_errors import ApiError
from gateway.responses.store import ENTRY_BYTES, ResponseStore
from tests.support.fake_clock import FakeClock

LENGTH = 100


def item(item_id: str) -> dict[str, Any]:
    """Some item."""
    return {"id": item_id, "type": "message"}


def response(response_id: str, previous_id: str | None = None, *, filler: int = 0) -> dict[str, Any]:
    """A response with one output item."""
    output = [item(f"out-{response_id}")]
    return {
        "id": response_id,
        "status": "completed",
        "previous_response_id": previous_id,
        "output": output,
        "x": "x" * filler,
    }


def keep(store: ResponseStore, response_id: str, previous_id: str | None = None, *, filler: int = 0) -> None:
    """Store a response with one input item."""
    store.keep(response(response_id, previous_id, filler=filler), [item(f"in-{response_id}")])


def ids(items: list[dict[str, Any]]) -> list[str]:
    """Of items."""
    return [found["id"] for found in items]


def is_kept(store: ResponseStore, response_id: str) -> bool:
    """Whether it is there; a use."""
    return store.find(response_id) is not None


def test_a_line_is_its_inputs_and_outputs_in_order():
    """And the inputs of a response are all but its own output."""
    store = ResponseStore(FakeClock())
    keep(store, "a")
    keep(store, "b", "a")
    keep(store, "other", "a")
    assert ids(store.context("b")) == ["in-a", "out-a", "in-b", "out-b"]
    assert ids(store.inputs("b")) == ["in-a", "out-a", "in-b"]
    assert ids(store.inputs("a")) == ["in-a"]
    assert json.loads(store.get("b").body) == response("b", "a")


def test_a_response_may_be_kept_again():
    """The later one counts, and is counted once."""
    store = ResponseStore(FakeClock())
    keep(store, "a", filler=10)
    keep(store, "a")
    assert json.loads(store.get("a").body) == response("a")
    assert store.held_bytes == store.get("a").size
    assert store.find_item("in-a") == item("in-a")


def test_items_are_found_by_their_ids():
    """Inputs and outputs alike, as long as their response is kept."""
    store = ResponseStore(FakeClock())
    keep(store, "a")
    assert store.find_item("in-a") == item("in-a")
    assert store.find_item("out-a") == item("out-a")
    store.delete("a")
    assert store.find_item("in-a") is None


def test_what_is_gone_says_why_and_what_to_do():
    """The store is bounded and in memory; the whole input can be sent instead."""
    store = ResponseStore(FakeClock())
    keep(store, "a")
    keep(store, "b", "a")
    store.delete("a")
    with pytest.raises(ApiError, match=r"in memory only.*Send the whole conversation as input") as raised:
        store.context("x")
    assert (raised.value.status, raised.value.code) == (404, "previous_response_not_found")
    with pytest.raises(ApiError, match="continues 'a', which is gone"):
        store.context("b")
    with pytest.raises(ApiError, match="in memory only") as raised:
        store.delete("a")
    assert (raised.value.status, raised.value.code) == (404, "response_not_found")


def test_too_many_drop_the_least_recently_used():
    """Using one keeps it, and all that it continues."""
    store = ResponseStore(FakeClock(), responses_max=3)
    keep(store, "a")
    keep(store, "b", "a")
    keep(store, "c")
    store.context("b")
    keep(store, "d")
    assert [is_kept(store, name) for name in "abcd"] == [True, True, False, True]


def test_the_end_of_a_line_goes_before_its_beginning():
    """So that what was dropped for room never leaves a gap."""
    store = ResponseStore(FakeClock(), responses_max=2)
    keep(store, "a")
    keep(store, "b", "a")
    keep(store, "c", "b")
    assert ids(store.context("b")) == ["in-a", "out-a", "in-b", "out-b"]
    assert not is_kept(store, "c")


def test_too_much_drops_as_well():
    """Bytes are counted as JSON."""
    store = ResponseStore(FakeClock(), bytes_max=3 * (ENTRY_BYTES + 1000))
    for name in "abcd":
        keep(store, name, filler=800)
    assert [is_kept(store, name) for name in "abcd"] == [False, True, True, True]
    keep(store, "huge", filler=10**6)
    assert store.held_bytes == 0


def test_what_nobody_uses_is_forgotten_in_time():
    """Use counts from the last time."""
    clock = FakeClock()
    store = ResponseStore(clock, kept_s=100)
    keep(store, "a")
    keep(store, "b")
    clock.skip(60)
    assert is_kept(store, "a")
    clock.skip(60)
    assert [is_kept(store, "a"), is_kept(store, "b")] == [True, False]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["keep", "use", "delete", "wait"]), st.integers(0, 9), st.integers(0, 9)), max_size=60
    )
)
def test_bounds_hold_and_no_line_has_a_gap_unless_one_was_deleted(steps: list[tuple[str, int, int]]):
    """Whatever is kept, used and forgotten."""
    clock = FakeClock()
    store = ResponseStore(clock, responses_max=5, bytes_max=6 * (ENTRY_BYTES + 500), kept_s=50)
    deletes = any(kind == "delete" for kind, _, _ in steps)
    for number, (kind, one, other) in enumerate(steps):
        name = f"{number}"
        previous = f"{number - 1 - one}"
        if kind == "keep":
            keep(store, name, previous if is_kept(store, previous) else None, filler=other * 100)
        elif kind == "use":
            is_kept(store, previous)
        elif kind == "wait":
            clock.skip(other * 5)
        elif is_kept(store, previous):
            store.delete(previous)
        kept = [other_id for other_id in map(str, range(number + 1)) if other_id in store._entries]
        assert len(kept) <= 5
        assert store.held_bytes <= 6 * (ENTRY_BYTES + 500)
        assert store.held_bytes == sum(entry.size for entry in store._entries.values())
        assert set(store._owners.values()) <= set(kept)
        if not deletes:
            lines = [store._entries[kept_id].previous_id for kept_id in kept]
            assert all(before in kept for before in lines if before is not None)
    if not deletes:
        for kept_id in list(store._entries):
            if is_kept(store, kept_id):
                assert store.context(kept_id)
