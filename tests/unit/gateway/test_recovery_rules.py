"""What a failure calls for, by value."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.admission import Admission, Demand
from gateway.journal import Journal
from gateway.placing import choose_node
from gateway.recovery import (
    RECOVERIES_PER_PASS_MAX,
    REFUSALS_PER_PASS_MAX,
    STALLS_PER_PASS_MAX,
    Action,
    judge,
)
from gateway.relay import Trouble
from gateway.session import Session, create_session
from shared.errors import (
    CACHE_MISS_REASONS,
    CacheMissed,
    DeadlineExceeded,
    FrameError,
    LinkClosed,
    MeshError,
    StepFailed,
)
from shared.layers import LayerRange
from shared.messages import NodeInfo, SamplingParams
from shared.route import Hop, Route


@pytest.mark.parametrize(
    ("error", "action"),
    [
        (LinkClosed("connection_lost", "x"), "anywhere"),
        (DeadlineExceeded("step_stalled", "x"), "elsewhere"),
        (FrameError("payload_too_large", "x"), "give_up"),
        (StepFailed("stale_epoch", "x"), "here"),
        (StepFailed("cancelled", "x"), "here"),
        (StepFailed("duplicate_step", "x"), "here"),
        (StepFailed("out_of_memory", "x"), "elsewhere"),
        (StepFailed("bad_step", "x"), "elsewhere"),
        (StepFailed("draining", "x"), "elsewhere"),
        (StepFailed("kv_budget_exceeded", "x"), "stateless"),
    ],
)
def test_each_failure_has_its_cure(error: MeshError, action: Action) -> None:
    """At its first occurrence."""
    assert judge(error, Trouble()) == action


def test_each_miss_has_its_cure() -> None:
    """A node that cannot hold the session is left, one that lost it is prefilled."""
    actions = {reason: judge(CacheMissed(reason), Trouble()) for reason in CACHE_MISS_REASONS}
    assert actions == {
        "unknown": "here",
        "not_rewindable": "here",
        "expired": "here",
        "evicted": "here",
        "past_len_mismatch": "here",
        "range_mismatch": "elsewhere",
        "model_mismatch": "elsewhere",
        "disabled": "stateless",
    }


def test_recoveries_of_a_pass_are_bounded() -> None:
    """Whatever the failures are."""
    trouble = Trouble()
    actions = [judge(CacheMissed("evicted"), trouble) for _ in range(RECOVERIES_PER_PASS_MAX + 1)]
    assert actions == ["here"] * RECOVERIES_PER_PASS_MAX + ["give_up"]


def test_refusals_are_bounded_lower_unless_the_node_is_only_busy() -> None:
    """A step that is at fault itself fails soon; a full queue says nothing against the step."""
    trouble = Trouble()
    actions = [judge(StepFailed("bad_step", "x"), trouble) for _ in range(REFUSALS_PER_PASS_MAX + 1)]
    assert actions == ["elsewhere"] * REFUSALS_PER_PASS_MAX + ["give_up"]
    busy = Trouble()
    assert {judge(StepFailed("queue_full", "x"), busy) for _ in range(RECOVERIES_PER_PASS_MAX)} == {"elsewhere"}


def test_missed_deadlines_are_counted() -> None:
    """They lengthen the next one, and a hop that goes on saying nothing is given up."""
    trouble = Trouble()
    actions = [judge(DeadlineExceeded("step_stalled", "x"), trouble) for _ in range(STALLS_PER_PASS_MAX + 1)]
    assert actions == ["elsewhere"] * STALLS_PER_PASS_MAX + ["give_up"]
    assert trouble.stalls == STALLS_PER_PASS_MAX + 1


def node(node_id: str, **fields: object) -> NodeInfo:
    """A ready node of a model of two layers."""
    info = NodeInfo(node=node_id, model="m", layers=LayerRange(0, 2), num_layers=2, state="ready")
    return replace(info, **fields)  # type: ignore[arg-type]


def started(*others: tuple[str, NodeInfo]) -> tuple[Admission, Session]:
    """An admission in which session ``s`` runs on node ``a``, and other sessions on their nodes."""
    admission = Admission(model="m", num_layers=2, queue_max=9)
    for session_id, where in (("s", node("a")), *others):
        admission.enqueue(Demand(sessions=(session_id,), tokens=10, tokens_min=1), [where])
        admission.admit([where])
    session = create_session(
        "s",
        route=Route((Hop("a", LayerRange(0, 2)),)),
        nodes={"a": node("a")},
        prompt_ids=[1],
        sampling=SamplingParams(),
        model="m",
        chunk_tokens=4,
        journal=Journal(0),
    )
    return admission, session


def chosen(nodes: list[NodeInfo], *others: tuple[str, NodeInfo], avoid: bool = False) -> str | None:
    """Id of the node that serves the hop from now on."""
    admission, session = started(*others)
    choice = choose_node(nodes, session, session.hops[0], admission, avoid=avoid)
    return choice.node if choice else None


def test_the_same_node_is_chosen_when_it_is_there() -> None:
    """It has a place for the session already, and may be loaded as it likes."""
    nodes = [node("a", kv_sessions_max=1), node("b")]
    assert chosen(nodes, ("other", node("a"))) == "a"


def test_another_node_is_preferred_after_a_stall_and_the_same_one_taken_for_want_of_others() -> None:
    """Rather the one that stalled than none."""
    assert chosen([node("a"), node("b")], avoid=True) == "b"
    assert chosen([node("a")], avoid=True) == "a"


def test_among_others_the_least_loaded_with_room_is_chosen() -> None:
    """Full ones, unready ones and those of other ranges do not count."""
    nodes = [
        node("full", kv_sessions_max=0),
        node("loading", state="loading"),
        node("larger", layers=LayerRange(0, 3), num_layers=3),
        node("busy"),
        node("idle"),
    ]
    assert chosen(nodes, ("other", node("busy"))) == "idle"
    assert chosen(nodes[:3]) is None
