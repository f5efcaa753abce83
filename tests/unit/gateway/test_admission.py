"""Who may start, who waits, who is sent away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.admission import RETRY_AFTER_S_MAX, Admission, Demand
from gateway.errors import AdmissionRefused
from gateway.places import KV_POSITIONS_MIN, Claim
from shared.layers import LayerRange
from shared.messages import NodeInfo

MODEL = "m"


def node(node_id: str = "a", layers: str = "0:2", **fields: object) -> NodeInfo:
    """A ready node of a model of two layers."""
    info = NodeInfo(node=node_id, model=MODEL, layers=LayerRange.parse(layers), num_layers=2, state="ready")
    return replace(info, **fields)  # type: ignore[arg-type]


def demand(session: str, tokens: int = 1000) -> Demand:
    """A demand that may begin with one token."""
    return Demand(sessions=(session,), tokens=tokens, tokens_min=1)


def create_admission(queue_max: int = 3) -> Admission:
    """An admission for that model."""
    return Admission(model=MODEL, num_layers=2, queue_max=queue_max)


def admitted(admission: Admission, *nodes: NodeInfo) -> list[str]:
    """Sessions that start now."""
    return [session for each in admission.admit(nodes) for session in each.sessions]


def test_sessions_start_in_order_until_the_slots_are_taken() -> None:
    """First come, first served; a released place goes to the next in line."""
    admission, only = create_admission(), node(kv_sessions_max=2)
    for session in ("s1", "s2", "s3"):
        admission.enqueue(demand(session), [only])
    assert admitted(admission, only) == ["s1", "s2"]
    assert admitted(admission, only) == []
    assert (admission.active, admission.queued) == (2, 1)
    admission.release("s1", lasted_s=1.0)
    assert admitted(admission, only) == ["s3"]


def test_bytes_are_reserved_for_the_longest_context_as_nodes_allocate_it() -> None:
    """1,000 tokens are 1,500 positions of K/V once the node has grown it; two such sessions take 3,000."""
    admission = create_admission()
    exact = node(kv_bytes_max=3000 * 7, kv_bytes_per_token=7)
    for session in ("s1", "s2", "s3"):
        admission.enqueue(demand(session), [exact])
    assert admitted(admission, exact) == ["s1", "s2"]


def test_short_sessions_count_as_what_is_allocated_at_least() -> None:
    """A node's first allocation has room for some hundred positions."""
    admission = create_admission()
    small = node(kv_bytes_max=2 * KV_POSITIONS_MIN, kv_bytes_per_token=1)
    for session in ("s1", "s2", "s3"):
        admission.enqueue(demand(session, tokens=2), [small])
    assert admitted(admission, small) == ["s1", "s2"]


def test_every_hop_must_have_room() -> None:
    """One full node on the way is enough to wait."""
    admission = create_admission()
    nodes = [node("a", "0:1"), node("b", "1:2", kv_sessions_max=1)]
    for session in ("s1", "s2"):
        admission.enqueue(demand(session), nodes)
    assert admitted(admission, *nodes) == ["s1"]
    assert admission.load() == {"a": 1, "b": 1}


def test_a_full_replica_is_passed_over() -> None:
    """The route leads over those that have room."""
    admission = create_admission()
    nodes = [node("a", kv_sessions_max=1), node("b", kv_sessions_max=1)]
    for session in ("s1", "s2"):
        admission.enqueue(demand(session), nodes)
    routes = {each.sessions[0]: each.route.hops[0].node for each in admission.admit(nodes)}
    assert routes == {"s1": "a", "s2": "b"}


def test_a_long_demand_at_the_front_is_not_overtaken() -> None:
    """Short ones would otherwise keep it waiting for ever."""
    admission = create_admission()
    tight = node(kv_bytes_max=2000, kv_bytes_per_token=1)
    for session, tokens in (("s1", 700), ("long", 1000), ("short", 10)):
        admission.enqueue(demand(session, tokens), [tight])
    assert admitted(admission, tight) == ["s1"]
    admission.withdraw(demand("long"))
    assert admitted(admission, tight) == ["short"]


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    """The bound is reached, and said."""
    admission, full = create_admission(queue_max=1), node(kv_sessions_max=1)
    admission.enqueue(demand("s1"), [full])
    admission.admit([full])
    admission.enqueue(demand("s2"), [full])
    with pytest.raises(AdmissionRefused) as refusal:
        admission.enqueue(demand("s3"), [full])
    assert refusal.value.code == "queue_full"
    assert refusal.value.retry_after_s == 1


def test_the_time_to_come_back_follows_from_what_generations_take() -> None:
    """Usual duration times those waiting per active one, within bounds."""
    admission, two = create_admission(), node(kv_sessions_max=2)
    admission.enqueue(demand("s1"), [two])
    admission.admit([two])
    admission.release("s1", lasted_s=10.0)
    for session in ("s2", "s3", "s4"):
        admission.enqueue(demand(session), [two])
    admission.admit([two])
    assert admission.retry_after_s() == 10
    admission.release("s2", lasted_s=10_000.0)
    assert admission.retry_after_s() == RETRY_AFTER_S_MAX


def test_what_can_never_fit_is_refused_for_good() -> None:
    """No empty mesh could hold the prompt; waiting would not help."""
    small = node(kv_bytes_max=100, kv_bytes_per_token=1)
    with pytest.raises(AdmissionRefused) as refusal:
        create_admission().enqueue(Demand(sessions=("s1",), tokens=300, tokens_min=101), [small])
    assert refusal.value.code == "session_too_large"
    assert refusal.value.retry_after_s is None


def test_an_open_ended_answer_takes_all_of_a_node_that_cannot_hold_the_longest() -> None:
    """It may begin, alone; answers rarely become as long as they may."""
    admission, small = create_admission(), node(kv_bytes_max=1000, kv_bytes_per_token=1)
    for session in ("s1", "s2"):
        admission.enqueue(demand(session, tokens=100_000), [small])
    assert admitted(admission, small) == ["s1"]


def test_a_node_without_a_cache_always_has_room() -> None:
    """It keeps nothing."""
    admission, stateless = create_admission(), node(kv_cache=False, kv_sessions_max=0)
    admission.enqueue(demand("s1"), [stateless])
    assert admitted(admission, stateless) == ["s1"]


def test_a_demand_waits_while_there_is_no_route() -> None:
    """Too large is only said of a mesh that could be judged."""
    admission = create_admission()
    admission.enqueue(demand("s1"), [])
    assert admitted(admission) == []
    assert admitted(admission, node()) == ["s1"]


def test_moving_a_hop_moves_its_reservation() -> None:
    """The old node's place is free at once, the new one's taken."""
    admission = create_admission()
    first, spare = node("a", kv_sessions_max=1), node("b", kv_sessions_max=1)
    admission.enqueue(demand("s1"), [first])
    admission.admit([first])
    assert admission.has_room(first, "s1", 1000)
    assert not admission.has_room(first, "other", 1000)
    admission.move("s1", "a", spare)
    assert admission.has_room(first, "other", 1000)
    assert not admission.has_room(spare, "other", 1000)
    admission.move("s1", None, first)
    assert admission.load() == {"a": 1, "b": 1}
    admission.release("s1", lasted_s=1.0)
    admission.release("s1", lasted_s=1.0)
    assert admission.load().total() == 0


def test_several_sessions_are_admitted_together_or_not_at_all() -> None:
    """Half of a wave's places are no use, and would be missed by others."""
    admission, only = create_admission(), node(kv_sessions_max=3)
    admission.enqueue(demand("s1"), [only])
    wave = Demand(sessions=("a", "b", "c"), tokens=10, tokens_min=1)
    admission.enqueue(wave, [only])
    assert admitted(admission, only) == ["s1"]
    assert admission.load() == {"a": 1}
    admission.release("s1", lasted_s=1.0)
    assert admitted(admission, only) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"kv_sessions_max": 3}, 3),
        ({"kv_bytes_max": 2 * KV_POSITIONS_MIN, "kv_bytes_per_token": 1}, 2),
        ({"kv_bytes_max": 10, "kv_bytes_per_token": 1}, 1),
        ({"kv_cache": False, "kv_sessions_max": 0}, 5),
    ],
)
def test_a_wave_is_as_large_as_an_empty_mesh_could_hold(fields: dict[str, object], count: int) -> None:
    """By slots and by bytes; the rest waits for its own turn."""
    admission, only = create_admission(), node(**fields)
    admission.enqueue(Demand(sessions=tuple("abcde"), tokens=10, tokens_min=1), [only])
    (wave,) = admission.admit([only])
    assert wave.sessions == tuple("abcde")[:count]


def test_a_wave_takes_the_route_that_holds_most() -> None:
    """Not the first by name."""
    admission = create_admission()
    nodes = [node("a", kv_sessions_max=2), node("b", kv_sessions_max=4)]
    admission.enqueue(Demand(sessions=tuple("vwxyz"), tokens=10, tokens_min=1), nodes)
    (wave,) = admission.admit(nodes)
    assert (wave.sessions, wave.route.hops[0].node) == (tuple("vwxy"), "b")


def test_what_has_begun_comes_first_and_is_not_refused() -> None:
    """Before lower priorities too; the queue's bound is for newcomers."""
    admission, only = create_admission(queue_max=1), node(kv_sessions_max=1)
    admission.enqueue(demand("s1"), [only])
    assert admitted(admission, only) == ["s1"]
    admission.enqueue(Demand(sessions=("urgent",), tokens=10, tokens_min=1, priority=-9), [only])
    admission.enqueue(Demand(sessions=("begun",), tokens=10, tokens_min=1, resumes=True), [only])
    admission.release("s1", lasted_s=1.0)
    assert admitted(admission, only) == ["begun"]
    with pytest.raises(AdmissionRefused, match="queue_full"):
        admission.enqueue(demand("s2"), [only])


def test_no_more_sessions_start_than_a_node_grants() -> None:
    """Other gateways have the rest; a grant that grows lets the next one start, and one that shrinks ends nothing."""
    grants = {"a": 1}
    admission, only = Admission(model=MODEL, num_layers=2, queue_max=9, granted=grants.get), node(kv_sessions_max=4)
    for session in ("s1", "s2", "s3"):
        admission.enqueue(demand(session), [only])
    assert admitted(admission, only) == ["s1"]
    grants["a"] = 2
    assert admitted(admission, only) == ["s2"]
    grants["a"] = 0
    assert admitted(admission, only) == []
    assert admission.demand("a") == (2, 1)
    admission.release("s1", lasted_s=1.0)
    assert admitted(admission, only) == []
    grants["a"] = 4
    assert admitted(admission, only) == ["s3"]


def test_a_grant_is_one_of_bytes_too_but_for_a_first_session() -> None:
    """Half the places are half the bytes; whoever has nothing there may begin with a long one all the same."""
    admission = Admission(model=MODEL, num_layers=2, queue_max=9, granted=lambda _: 2)
    only = node(kv_sessions_max=4, kv_bytes_max=4 * 1500 * 7, kv_bytes_per_token=7)
    admission.enqueue(demand("long", tokens=2500), [only])
    admission.enqueue(demand("next"), [only])
    assert admitted(admission, only) == ["long"]
    admission.release("long", lasted_s=1.0)
    assert admitted(admission, only) == ["next"]


def test_choices_that_no_grant_holds_at_once_run_in_waves() -> None:
    """Two gateways that want everything each must not wait for each other's places."""
    admission, only = Admission(model=MODEL, num_layers=2, queue_max=9, granted=lambda _: 2), node(kv_sessions_max=4)
    admission.enqueue(Demand(sessions=("s1", "s2", "s3", "s4"), tokens=10, tokens_min=1), [only])
    assert admitted(admission, only) == ["s1", "s2"]


def test_an_empty_grant_refuses_nobody_for_good() -> None:
    """A request waits for its turn; it is not told that it could never be served."""
    admission, only = Admission(model=MODEL, num_layers=2, queue_max=9, granted=lambda _: 0), node(kv_sessions_max=4)
    admission.enqueue(demand("s1"), [only])
    assert admitted(admission, only) == []
    assert admission.queued == 1


def test_nobody_is_admitted_where_a_session_under_way_waits_for_a_place() -> None:
    """It comes before all that have not begun; nodes that are of no use to it are free for them."""
    admission, full, other = create_admission(), node("a", kv_sessions_max=1), node("b", kv_sessions_max=1)
    with admission.claim("under way", Claim(lambda node: node.node == "a")):
        admission.enqueue(demand("s1"), [full])
        assert admitted(admission, full) == []
        assert admitted(admission, full, other) == ["s1"]
        admission.enqueue(demand("s2"), [full])
        assert admitted(admission, full, other) == []
    assert admitted(admission, full, other) == ["s2"]


def test_a_session_under_way_that_waits_for_a_place_is_among_those_that_nodes_hear_of() -> None:
    """Else a node whose only place is granted to another gateway would never grant it to this one."""
    admission = create_admission()
    admission.enqueue(demand("s1"), [node()])
    assert admission.demand("a") == (0, 1)
    with admission.claim("under way", Claim(lambda node: node.node == "a")):
        assert admission.demand("a") == (0, 2)
