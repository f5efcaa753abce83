"""The session store: what a decode may find, and when a session goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from shard.kv_cache import GONE_SESSIONS_MAX, SessionStore
from shard.session import Session
from shared.errors import CacheMissed, StepFailed
from shared.layers import LayerRange
from shared.messages import SamplingParams, Step
from tests.support.fake_clock import FakeClock

LAYERS = LayerRange(2, 4)
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Cache:
    """Ten bytes a position."""

    length: int = 0
    bytes_per_token: int = 10

    @property
    def nbytes(self) -> int:
        """As allocated."""
        return self.length * self.bytes_per_token


def prefill(session: str = "s", new_len: int = 4, step_index: int = 0, **fields: Any) -> Step:
    """A prefill of four positions."""
    return _step(session, "prefill", step_index, new_len=new_len, **fields)


def decode(past_len: int, session: str = "s", step_index: int = 1, **fields: Any) -> Step:
    """A decode of one position."""
    return _step(session, "decode", step_index, past_len=past_len, **fields)


def _step(session: str, cache: Any, step_index: int, **fields: Any) -> Step:
    values = {"layers": LAYERS, "model": "m", **fields}
    return Step(session=session, cache=cache, step_index=step_index, **values)


@pytest.fixture
def clock() -> FakeClock:
    """Time that stands still."""
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> SessionStore:
    """Three sessions, 200 bytes, 100 seconds."""
    return SessionStore(ttl_s=100.0, sessions_max=3, bytes_max=200, clock=clock)


def hold(store: SessionStore, session: str = "s", length: int = 4, **fields: Any) -> Session:
    """Prefill a session and commit it."""
    step = prefill(session, new_len=length, **fields)
    cache = Cache()
    opened = store.start(step, cache)
    cache.length = length
    assert store.commit(opened, step)
    return opened


def continue_by_one(store: SessionStore, step: Step) -> None:
    """Serve a decode."""
    opened = store.lookup(step)
    assert isinstance(opened.cache, Cache)
    opened.cache.length += step.new_len
    store.commit(opened, step)


def miss(store: SessionStore, step: Step) -> CacheMissed:
    """The miss that a decode meets."""
    with pytest.raises(CacheMissed) as caught:
        store.lookup(step)
    return caught.value


def held(store: SessionStore) -> list[str]:
    """The sessions listed, least recently used first."""
    return list(store._listed)


def test_decode_continues_at_exactly_the_held_position(store: SessionStore) -> None:
    """Each decode finds the session where the one before left it."""
    hold(store)
    continue_by_one(store, decode(4))
    continue_by_one(store, decode(5, step_index=2))
    assert store.lookup(decode(6, step_index=3)).length == 6


def test_unknown_session_is_a_miss(store: SessionStore) -> None:
    """A session never seen is `unknown`, and nothing is held instead."""
    caught = miss(store, decode(4))
    assert caught.reason == "unknown"
    assert "held_len" not in caught.fields


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"past_len": 3}, "past_len_mismatch"),
        ({"past_len": 5}, "past_len_mismatch"),
        ({"past_len": 2, "rewind_from": 3}, "past_len_mismatch"),
        ({"layers": LayerRange(0, 2)}, "range_mismatch"),
        ({"model": "other"}, "model_mismatch"),
    ],
)
def test_anything_but_the_exact_session_is_a_miss(store: SessionStore, fields: dict[str, Any], reason: str) -> None:
    """Position, range and model must all be the held ones; the miss says which is not, and what is held."""
    hold(store)
    caught = miss(store, decode(**{"past_len": 4, **fields}))
    assert caught.reason == reason
    assert caught.fields["held_len"] == 4
    assert store.lookup(decode(4)).length == 4


def test_duplicate_decode_is_not_applied_again(store: SessionStore) -> None:
    """The second copy of a decode names a position that has passed."""
    hold(store)
    continue_by_one(store, decode(4))
    assert miss(store, decode(4)).reason == "past_len_mismatch"


def test_duplicate_prefill_does_not_take_the_session_back(store: SessionStore) -> None:
    """A late copy of a prefill must not replace what has moved on; a new epoch may."""
    hold(store)
    continue_by_one(store, decode(4))
    with pytest.raises(StepFailed, match="duplicate_step"):
        store.start(prefill(), Cache())
    hold(store, length=2, epoch=1)
    assert store.lookup(decode(2, epoch=1)).length == 2


def test_lower_epoch_is_refused(store: SessionStore) -> None:
    """Once a session has seen an epoch, steps of an earlier one are stale, whatever they ask."""
    hold(store, epoch=2)
    with pytest.raises(StepFailed, match="stale_epoch"):
        store.lookup(decode(4, epoch=1))
    with pytest.raises(StepFailed, match="stale_epoch"):
        store.start(prefill(epoch=1, step_index=7), Cache())


def test_decode_may_raise_the_epoch(store: SessionStore) -> None:
    """When another hop was rebuilt, this one goes on under the new epoch and forgets the old."""
    hold(store)
    continue_by_one(store, decode(4, epoch=3))
    with pytest.raises(StepFailed, match="stale_epoch"):
        store.lookup(decode(5, epoch=2))


def test_failed_decode_drops_the_session(store: SessionStore) -> None:
    """Half a step may be in the cache, so nothing of it is kept, and the next decode misses."""
    hold(store)
    store.abort(store.lookup(decode(4)), "failed")
    assert miss(store, decode(4)).reason == "unknown"
    assert store.figures() == (0, 0, {"failed": 1})


def test_failed_prefill_leaves_the_old_session(store: SessionStore) -> None:
    """A prefill replaces only when it is complete."""
    hold(store)
    opened = store.start(prefill(epoch=1), Cache())
    assert store.holds("s")
    store.abort(opened, "failed")
    assert store.lookup(decode(4)).length == 4


def test_prefill_replaces_and_its_bytes_are_counted_once(store: SessionStore) -> None:
    """The replaced session's bytes leave the budget, and replacing is no eviction."""
    hold(store, length=10)
    hold(store, length=3, epoch=1)
    assert store.figures() == (1, 30, {})


def test_refused_step_leaves_the_session_as_it_was(store: SessionStore) -> None:
    """A decode refused before computing is put back and can be tried again."""
    hold(store)
    store.put_back(store.lookup(decode(4)))
    assert store.lookup(decode(4)).length == 4


def test_session_expires_on_access(store: SessionStore, clock: FakeClock) -> None:
    """Past its time to live a session is gone at the next look, without any sweep, and says why."""
    hold(store)
    clock.jump(99.9)
    store.put_back(store.lookup(decode(4)))
    clock.jump(100.0)
    assert miss(store, decode(4)).reason == "expired"
    assert store.figures() == (0, 0, {"expired": 1})


def test_sweep_frees_an_idle_node(store: SessionStore, clock: FakeClock) -> None:
    """Without any step, expired sessions' memory is given back."""
    hold(store, "a")
    clock.jump(60.0)
    hold(store, "b")
    clock.jump(60.0)
    store.sweep()
    assert held(store) == ["b"]


def test_least_recently_used_session_is_evicted(store: SessionStore) -> None:
    """Over the session limit the one untouched for longest goes, and its next decode says `evicted`."""
    for session in ("a", "b", "c"):
        hold(store, session)
    continue_by_one(store, decode(4, session="a"))
    hold(store, "d")
    assert held(store) == ["c", "a", "d"]
    assert miss(store, decode(4, session="b")).reason == "evicted"


def test_byte_budget_evicts_as_sessions_grow(store: SessionStore) -> None:
    """The budget counts allocated bytes after each step, whichever session grew."""
    hold(store, "a", length=9)
    hold(store, "b", length=10)
    assert held(store) == ["a", "b"]
    continue_by_one(store, decode(10, session="b", new_len=2))
    assert held(store) == ["b"]
    assert store.figures() == (1, 120, {"evicted": 1})


def test_session_over_the_whole_budget_is_a_clear_error(store: SessionStore) -> None:
    """It fails naming the limit, is dropped, and takes no other session with it."""
    hold(store, "a")
    opened = store.start(prefill("big"), cache := Cache())
    cache.length = 21
    with pytest.raises(StepFailed, match="kv_bytes_max is 200") as caught:
        store.commit(opened, prefill("big"))
    assert caught.value.code == "kv_budget_exceeded"
    assert held(store) == ["a"]
    assert miss(store, decode(21, session="big")).reason == "evicted"


def test_session_that_grows_over_the_whole_budget_is_dropped(store: SessionStore) -> None:
    """Also a decode that outgrows the budget fails and leaves nothing behind."""
    hold(store, length=20)
    opened = store.lookup(decode(20))
    assert isinstance(opened.cache, Cache)
    opened.cache.length = 21
    with pytest.raises(StepFailed, match="kv_budget_exceeded"):
        store.commit(opened, decode(20))
    assert store.figures() == (0, 0, {"evicted": 1})


def test_running_session_is_never_evicted(store: SessionStore, clock: FakeClock) -> None:
    """While a step has a session open, neither limits nor time take it; others go instead."""
    hold(store, "a")
    running = store.lookup(decode(4, session="a"))
    clock.jump(150.0)
    for session in ("b", "c", "d"):
        hold(store, session)
    assert held(store) == ["a", "c", "d"]
    assert isinstance(running.cache, Cache)
    running.cache.length = 5
    assert store.commit(running, decode(4, session="a"))
    assert store.lookup(decode(5, session="a", step_index=2)).length == 5


def test_session_that_runs_cannot_be_opened_twice(store: SessionStore) -> None:
    """Two steps of one session never share its cache."""
    hold(store)
    store.lookup(decode(4))
    with pytest.raises(StepFailed, match="session_busy"):
        store.lookup(decode(4))


def test_release_frees_and_is_forgotten(store: SessionStore) -> None:
    """A released session is unknown afterwards; releasing again is no error."""
    hold(store)
    assert store.release("s")
    assert not store.release("s")
    assert miss(store, decode(4)).reason == "unknown"
    assert store.figures() == (0, 0, {"released": 1})


def test_release_during_decode_takes_effect_when_the_step_ends(store: SessionStore) -> None:
    """Lookups miss at once, and the running step's commit lists nothing."""
    hold(store)
    running = store.lookup(decode(4))
    store.release("s", "cancelled")
    assert miss(store, decode(4)).reason == "unknown"
    assert not store.commit(running, decode(4))
    assert store.figures() == (0, 0, {"cancelled": 1})


def test_release_during_prefill_takes_effect_when_the_step_ends(store: SessionStore) -> None:
    """A session cancelled while it is being made is never listed."""
    opened = store.start(prefill(), Cache(length=4))
    assert store.release("s", "cancelled")
    assert not store.commit(opened, prefill())
    assert not store.holds("s")


def test_prefill_after_a_loss_clears_its_reason(store: SessionStore, clock: FakeClock) -> None:
    """A session that is made again, then released, is unknown and not `expired`."""
    hold(store)
    clock.jump(101.0)
    hold(store, epoch=1)
    store.release("s")
    assert miss(store, decode(4)).reason == "unknown"


def test_memory_of_lost_sessions_is_bounded(store: SessionStore) -> None:
    """Of very many evicted sessions the oldest are `unknown`: the memory of reasons has a limit."""
    for number in range(GONE_SESSIONS_MAX + 4):
        hold(store, f"s{number}")
    assert len(store._gone) == GONE_SESSIONS_MAX
    assert miss(store, decode(4, session="s0")).reason == "unknown"
    assert miss(store, decode(4, session="s1")).reason == "evicted"


def test_decode_keeps_the_sampling_of_the_prefill(store: SessionStore) -> None:
    """Sampling parameters named once hold until a step names others."""
    hold(store, sampling=GREEDY)
    continue_by_one(store, decode(4))
    assert store.lookup(decode(5, step_index=2)).sampling == GREEDY


def test_commit_without_open_is_our_own_bug(store: SessionStore) -> None:
    """Committing twice raises instead of corrupting the figures."""
    opened = hold(store)
    with pytest.raises(ValueError, match="not open"):
        store.commit(opened, prefill())
