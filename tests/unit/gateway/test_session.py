"""The steps that follow from a session's state, by value."""

from __future__ import annotations

from math import prod

import pytest

from gateway.journal import Journal, StepInput
from gateway.logprob_rows import TOKEN_ID_MAX
from gateway.session import Session, create_session, fork_session
from gateway.step_answer import drawn_token, hidden_states
from gateway.step_plan import ReplayNeeded, accept, plan_step
from shared.errors import StepFailed
from shared.layers import LayerRange
from shared.messages import NodeInfo, SamplingParams, Step, StepResult
from shared.route import Hop, Route
from shared.tensor_spec import WireTensor
from tests.support.fake_runner import read_ids, write_hidden

SAMPLING = SamplingParams(temperature=0.5, seed=3)
RANGES = [LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 6)]


def create(prompt_len: int = 10, *, stateless: tuple[int, ...] = (), journal_bytes_max: int = 1 << 20) -> Session:
    """A session over three hops, chunks of 4."""
    nodes = {
        name: NodeInfo(
            node=name, model="m", layers=layers, num_layers=6, state="ready", kv_cache=index not in stateless
        )
        for index, (name, layers) in enumerate(zip("abc", RANGES, strict=True))
    }
    return create_session(
        "s",
        route=Route(tuple(Hop(name, info.layers) for name, info in nodes.items())),
        nodes=nodes,
        prompt_ids=range(prompt_len),
        sampling=SAMPLING,
        model="m",
        chunk_tokens=4,
        journal=Journal(journal_bytes_max),
    )


def hidden(length: int) -> StepInput:
    """Hidden states of so many positions."""
    return StepInput("hidden_states", write_hidden(range(length)), length)


def step_into(session: Session, index: int, entering: StepInput) -> Step:
    """Plan the step by which this enters a hop, and accept its answer."""
    session.hops[index].journal.append(entering)
    output_len = session.output_len(index, entering.new_len)
    step, _ = plan_step(session, index, entering, output_len)
    is_cached = step.cache is not None
    accept(session, index, step, StepResult(session="s", step_index=step.step_index, cached=is_cached))
    return step


def run_pass(session: Session, end: int) -> list[Step]:
    """The steps of one undisturbed pass."""
    entering = session.begin_pass(end)
    steps = [step_into(session, 0, entering)]
    steps += [step_into(session, index, hidden(entering.new_len)) for index in (1, 2)]
    session.end_pass()
    return steps


def test_a_prefill_is_cut_into_chunks() -> None:
    """The last chunk ends with the prompt."""
    assert create(10).chunk_ends(10) == [4, 8, 10]
    assert create(8).chunk_ends(8) == [4, 8]
    assert create(1).chunk_ends(1) == [1]


def test_a_prefill_through_a_stateless_hop_is_not_cut() -> None:
    """That hop needs all positions at each step, so chunks would only repeat work."""
    assert create(10, stateless=(1,)).chunk_ends(10) == [10]


def test_the_first_chunk_creates_and_the_next_continue() -> None:
    """Only the first names the route and brings the sampling parameters."""
    session = create(10)
    first = run_pass(session, 4)
    second = run_pass(session, 8)
    assert [(step.cache, step.past_len, step.new_len) for step in first] == [("prefill", 0, 4)] * 3
    assert [(step.cache, step.past_len, step.new_len) for step in second] == [("decode", 4, 4)] * 3
    assert [step.route for step in first] == [session.route] * 3
    assert [step.route for step in second] == [None] * 3
    assert [step.sampling for step in first] == [None, None, SAMPLING]
    assert [step.sampling for step in second] == [None] * 3
    assert [step.step_index for step in first + second] == [0, 0, 0, 1, 1, 1]


def test_only_the_last_pass_of_a_prefill_samples() -> None:
    """Before it, the last hop returns nothing; the others return all positions."""
    session = create(10)
    assert [step.output_len for step in run_pass(session, 4)] == [None, None, 0]
    assert [step.output_len for step in run_pass(session, 8)] == [None, None, 0]
    assert [step.output_len for step in run_pass(session, 10)] == [None, None, None]


def test_a_decode_carries_one_position() -> None:
    """The header has nothing that the node knows already."""
    session = create(4)
    run_pass(session, 4)
    session.ids.append(77)
    first, _, last = run_pass(session, 5)
    assert first == Step(
        session="s", step_index=1, cache="decode", past_len=4, new_len=1, layers=LayerRange(0, 2), model="m"
    )
    assert (last.sampling, last.output_len) == (None, None)


def test_a_stateless_hop_is_given_everything_each_time() -> None:
    """Its neighbours are not: they keep what they hold."""
    session = create(4, stateless=(1,))
    run_pass(session, 4)
    session.ids.append(77)
    steps = run_pass(session, 5)
    assert [(step.cache, step.past_len, step.new_len) for step in steps] == [
        ("decode", 4, 1),
        (None, 0, 5),
        ("decode", 4, 1),
    ]
    assert steps[1].output_len == 1
    assert steps[1].route == session.route


def test_a_stateless_last_hop_is_given_its_sampling_each_time() -> None:
    """It keeps nothing, that included."""
    session = create(4, stateless=(2,))
    run_pass(session, 4)
    session.ids.append(77)
    assert run_pass(session, 5)[2].sampling == SAMPLING


def test_a_node_that_keeps_no_session_is_stateless_from_then_on() -> None:
    """It announced a cache, and its answer says otherwise."""
    session = create(4)
    entering = session.begin_pass(4)
    session.hops[0].journal.append(entering)
    step, _ = plan_step(session, 0, entering, 4)
    accept(session, 0, step, StepResult(session="s", step_index=0, cached=False))
    assert (session.hops[0].mode, session.hops[0].held_len) == ("stateless", 0)


def test_a_stateless_hop_whose_journal_was_dropped_needs_a_replay() -> None:
    """Nothing can be sent to it from here."""
    session = create(4, stateless=(1,), journal_bytes_max=0)
    run_pass(session, 4)
    session.ids.append(77)
    session.begin_pass(5)
    with pytest.raises(ReplayNeeded):
        step_into(session, 1, hidden(1))


def test_the_source_of_a_replay_is_the_nearest_whole_journal() -> None:
    """At worst the token ids."""
    session = create(4)
    run_pass(session, 4)
    assert [session.source_of(index) for index in range(3)] == [0, 1, 2]
    session.hops[2].journal.restart()
    assert session.source_of(2) == 1
    session.hops[1].journal.restart()
    assert session.source_of(2) == 0


def test_restarting_a_session_prefills_everything_again() -> None:
    """As a tail that returns text demands for every token."""
    session = create(4)
    run_pass(session, 4)
    session.ids.append(77)
    session.restart()
    assert [step.cache for step in run_pass(session, 5)] == ["prefill"] * 3
    assert session.hops[1].journal.length == 5


def test_a_new_epoch_names_the_route_anew() -> None:
    """A hop may have moved."""
    session = create(4)
    before = session.route
    session.hops[1].place(NodeInfo(node="z", model="m", layers=RANGES[1], num_layers=6))
    session.begin_epoch()
    assert session.epoch == 1
    assert [hop.node for hop in before.hops] == ["a", "b", "c"]
    assert [hop.node for hop in session.route.hops] == ["a", "z", "c"]


def test_an_answer_without_hidden_states_is_an_error_of_the_node() -> None:
    """A peer's fault, not an assertion."""
    with pytest.raises(StepFailed, match="bad_answer"):
        hidden_states({}, 1)


@pytest.mark.parametrize("token_ids", [(), (1, 2), (TOKEN_ID_MAX + 1,)])
def test_an_answer_without_a_usable_token_is_an_error_of_the_node(token_ids: tuple[int, ...]) -> None:
    """One id that fits on the wire."""
    with pytest.raises(StepFailed, match="bad_answer"):
        drawn_token(StepResult(session="s", step_index=0, token_ids=token_ids), None)


def test_an_answer_is_a_token_of_the_vocabulary() -> None:
    """Where its size is known; ids may have 31 bits otherwise."""
    for token_id in (0, 9):
        assert drawn_token(StepResult(session="s", step_index=0, token_ids=(token_id,)), 10) == token_id
    for token_id in (-1, 10, TOKEN_ID_MAX):
        with pytest.raises(StepFailed, match="bad_answer"):
            drawn_token(StepResult(session="s", step_index=0, token_ids=(token_id,)), 10)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((1, 3, 8), True),
        ((1, 2, 8), False),
        ((1, 4, 8), False),
        ((1, 8, 3), False),
        ((3, 8), True),
        ((2, 1, 3, 8), True),
        ((2, 1, 4, 8), False),
        ((), False),
    ],
)
def test_hidden_states_are_of_the_positions_that_were_asked_for(shape: tuple[int, ...], fits: bool) -> None:
    """In axis 1 of a batch of one, and in any axis of another rank."""
    tensor = WireTensor("f32", shape, memoryview(bytes(4 * prod(shape))))
    if fits:
        assert hidden_states({"hidden_states": tensor}, 3).tensor is tensor
        return
    with pytest.raises(StepFailed, match="3 positions"):
        hidden_states({"hidden_states": tensor}, 3)


def test_a_last_hop_answers_with_an_id_or_a_text() -> None:
    """Neither is an error of the node."""
    assert drawn_token(StepResult(session="s", step_index=0, token_ids=(TOKEN_ID_MAX,)), None) == TOKEN_ID_MAX
    assert drawn_token(StepResult(session="s", step_index=0, text="x"), 10) is None
    with pytest.raises(StepFailed, match="bad_answer"):
        drawn_token(StepResult(session="s", step_index=0), None)


def test_a_draw_with_history_is_told_the_ids_at_each_step_of_the_last_hop() -> None:
    """Of exactly its positions; a stateless hop is told all, and no other hop any."""
    for stateless in ((), (2,)):
        session = create(6, stateless=stateless)
        session.sampling = SamplingParams(repetition_penalty=1.2)
        named = [run_named(session, end) for end in session.chunk_ends(6)]
        session.ids.append(77)
        named.append(run_named(session, 7))
        whole = list(range(6))
        assert named == ([[*whole], [*whole, 77]] if stateless else [[0, 1, 2, 3], [4, 5], [77]])


def run_named(session: Session, end: int) -> list[int]:
    """The token ids that the last hop is told in one pass; the second hop must be told none."""
    step_into(session, 0, session.begin_pass(end))
    for index in (1, 2):
        entering = hidden(end - session.passed)
        session.hops[index].journal.append(entering)
        step, tensors = plan_step(session, index, entering, session.output_len(index, entering.new_len))
        accept(session, index, step, StepResult(session="s", step_index=step.step_index, cached=step.cache is not None))
        assert ("token_ids" in tensors) is (index == 2)
    named = read_ids(tensors["token_ids"])
    session.end_pass()
    return named


def test_a_fork_goes_on_from_the_same_positions() -> None:
    """With its own ids, journals, epochs and sampling; the source notices nothing."""
    session = create(6)
    run_pass(session, 4)
    session.begin_epoch()
    sampling = SamplingParams(seed=9)
    copy = fork_session(session, "t", sampling)
    copy.ids.append(77)
    copy.begin_epoch()
    copy.hops[1].forget()
    steps = run_pass(copy, 6)
    assert [(step.session, step.cache, step.past_len, step.epoch) for step in (steps[0], steps[2])] == [
        ("t", "decode", 4, 2),
        ("t", "decode", 4, 2),
    ]
    assert copy.sampling == sampling
    assert (session.epoch, len(session.ids), session.passed) == (1, 6, 4)
    assert [hop.held_len for hop in session.hops] == [4, 4, 4]
    assert [hop.journal.length for hop in session.hops] == [4, 4, 4]
    assert [hop.journal.length for hop in copy.hops] == [6, 6, 6]


def test_a_session_forks_only_between_two_passes() -> None:
    """Before the first there is nothing to copy, within one the hops hold different lengths."""
    session = create(6)
    with pytest.raises(ValueError, match="0 of 0"):
        fork_session(session, "t", SAMPLING)
    run_pass(session, 4)
    session.begin_pass(6)
    with pytest.raises(ValueError, match="4 of 6"):
        fork_session(session, "t", SAMPLING)
