"""Only the lost hop is rebuilt, and the tokens stay the same.

Three hops of two layers, a prompt of 5 in chunks of 4, so a node sees steps number 0 and 1 for the prefill
and one more per token. Every scripted token depends on every input in every hop's cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from gateway.errors import GenerationFailed
from gateway.liveness import SILENCE_MAX_S, TICK_S
from gateway.recovery import RECOVERIES_PER_PASS_MAX, REFUSALS_PER_PASS_MAX
from shared.errors import FrameError
from shared.messages import Message, Step, StepResult
from shared.tensor_spec import WireTensor
from tests.support.fake_runner import read_hidden, write_hidden
from tests.support.memory_mesh import PROMPT, SEEDED, ScriptedMesh, expected, idle, scripted_mesh
from tests.support.scripted_node import (
    VOCAB_SIZE,
    Crash,
    Cut,
    Drop,
    Fail,
    Fate,
    Late,
    Mangle,
    Miss,
    Script,
    ScriptedLink,
    Slow,
    nth,
)

LONG_PROMPT = tuple(range(100, 119))
Change = Callable[[Message, dict[str, WireTensor]], tuple[Message, dict[str, WireTensor]]]
REPLICAS = ("0:2", "2:4", "4:6", "0:2", "2:4", "4:6")


async def check(mesh: ScriptedMesh, max_tokens: int = 8, **fields: object) -> None:
    """Generate, compare with the reference, and look for what is left."""
    tokens = await mesh.drive(mesh.generate(max_tokens, **fields))
    await idle()
    assert tokens == expected(max_tokens, **fields)
    mesh.assert_nothing_left()


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("reason", ["unknown", "expired", "evicted", "past_len_mismatch"])
async def test_a_miss_rebuilds_that_hop_alone(hop: int, reason: str) -> None:
    """In mid-decode, at each hop: one more prefill there, none elsewhere."""
    async with scripted_mesh() as mesh:
        mesh.nodes[hop].script = nth(5, Miss(reason))  # type: ignore[arg-type]
        await check(mesh)
        assert mesh.prefills() == [1 + (index == hop) for index in range(3)]
        assert mesh.generator.totals.replays == 1
        assert mesh.generator.totals.full_replays == 0


@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_a_seeded_stream_survives_a_miss(hop: int) -> None:
    """The random number of a position does not depend on how often it is computed."""
    async with scripted_mesh() as mesh:
        mesh.nodes[hop].script = nth(5, Miss())
        await check(mesh, sampling=SEEDED)


@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_two_misses_in_one_generation(hop: int) -> None:
    """The second replay starts from the journal as it went on after the first."""
    async with scripted_mesh() as mesh:
        mesh.nodes[hop].script = lambda _step, count: Miss() if count in {4, 12} else None
        await check(mesh, 12)
        assert mesh.prefills()[hop] == 3


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("chunk", [1, 2])
async def test_a_miss_in_a_later_chunk_of_the_prefill(hop: int, chunk: int) -> None:
    """The hop is rebuilt up to the end of that chunk, and the prefill goes on."""
    async with scripted_mesh() as mesh:
        mesh.nodes[hop].script = nth(chunk, Miss())
        await check(mesh, prompt_ids=LONG_PROMPT)
        assert mesh.prefills() == [1 + (index == hop) for index in range(3)]


async def test_a_replay_is_cut_into_chunks() -> None:
    """A long history does not become one long step."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = nth(9, Miss())
        await check(mesh, prompt_ids=LONG_PROMPT)
        replayed = [step for step in mesh.nodes[1].seen if step.epoch == 1][:6]
        assert [step.cache for step in replayed] == ["prefill", *["decode"] * 5]
        assert sum(step.new_len for step in replayed) == len(LONG_PROMPT) + 5
        assert all(step.new_len <= 4 for step in replayed)
        assert [step.output_len for step in replayed[:-1]] == [0] * 5


async def test_a_replay_has_a_higher_epoch() -> None:
    """So that what the node answers to older steps cannot be mistaken."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = nth(4, Miss())
        await check(mesh)
        assert {step.epoch for step in mesh.nodes[1].seen[5:]} == {1}
        assert [step.epoch for step in mesh.nodes[0].seen] == [0] * 5 + [1] * 4


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("applied", [True, False])
async def test_a_link_lost_while_waiting(hop: int, applied: bool) -> None:
    """Whether the node had computed the step or not: the same process is prefilled anew."""
    async with scripted_mesh() as mesh:
        mesh.nodes[hop].script = nth(5, Cut(applied))
        await check(mesh)
        assert mesh.prefills() == [1 + (index == hop) for index in range(3)]


@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_a_restarted_node_is_prefilled_anew(hop: int) -> None:
    """The same address, another process, after a while."""
    async with scripted_mesh() as mesh:
        mesh.nodes[hop].script = nth(5, Crash(back_after_s=7.0))
        started_s = mesh.clock.monotonic()
        await check(mesh)
        assert 7.0 <= mesh.clock.monotonic() - started_s < 10.0
        assert mesh.prefills() == [1 + (index == hop) for index in range(3)]
        assert mesh.generator.totals.moves == 0


async def test_a_node_that_restarted_between_two_steps_misses_and_is_rebuilt() -> None:
    """Nobody was waiting when it went, so it is found out by its miss."""
    async with scripted_mesh() as mesh:
        async with mesh.generator.generation(mesh.request()) as tokens:
            seen = [(await mesh.drive(anext(tokens))).id for _ in range(3)]
            mesh.nodes[1].restart()
            await mesh.until(lambda: mesh.mesh.link("b") is not None and mesh.nodes[1].dials == 2)
            seen += [(await mesh.drive(anext(tokens))).id for _ in range(5)]
        await idle()
        assert seen == expected()
        mesh.assert_nothing_left()


@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_a_replica_takes_over_at_once(hop: int) -> None:
    """No need to wait for the lost one; the others are not touched."""
    async with scripted_mesh(REPLICAS) as mesh:
        mesh.nodes[hop].script = nth(5, Crash(back_after_s=None))
        started_s = mesh.clock.monotonic()
        await check(mesh)
        assert mesh.clock.monotonic() == started_s
        assert mesh.prefills() == [1, 1, 1, *(int(index == hop) for index in range(3))]
        assert mesh.generator.totals.moves == 1
        assert mesh.generator.admission.load().total() == 0


async def test_the_least_loaded_replica_with_room_is_chosen() -> None:
    """One is full, one serves somebody, one is idle."""
    ranges = ["0:6"] * 4
    async with scripted_mesh(ranges, node_options={3: {"sessions_max": 0}}) as mesh:
        others = [mesh.generator.generation(mesh.request()) for _ in range(2)]
        streams = [await mesh.drive(other.__aenter__()) for other in others]
        await mesh.drive(asyncio.gather(*(anext(stream) for stream in streams)))
        mesh.nodes[2].script = nth(3, Crash(back_after_s=None))
        mesh.nodes[0].sessions_max = 1
        assert await mesh.drive(mesh.generate()) == expected()
        assert mesh.nodes[3].steps.total() == 0
        for other in others:
            await other.__aexit__(None, None, None)


async def test_a_stalled_node_is_left_for_its_replica() -> None:
    """Its heartbeats go on, its compute does not; within two seconds and its usual step."""
    async with scripted_mesh(REPLICAS) as mesh:
        mesh.nodes[1].script = nth(5, Drop())
        started_s = mesh.clock.monotonic()
        await check(mesh)
        assert 2.0 < mesh.clock.monotonic() - started_s < 3.0
        assert mesh.nodes[4].steps["prefill"] == 1


async def test_a_stalled_node_without_replica_is_asked_again() -> None:
    """It may only have lost that one step."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = nth(5, Drop(applied=True))
        await check(mesh)
        assert mesh.prefills() == [1, 2, 1]


async def test_an_answer_after_the_deadline_is_dropped() -> None:
    """The step's number and epoch are those of a step nobody waits for."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = nth(5, Late(2.9))
        await mesh.drive(mesh.clock.sleep(0.1))
        await check(mesh)
        await mesh.drive(mesh.clock.sleep(5))
        assert mesh.mesh.links[1].late_answers == 1


async def test_a_node_that_has_become_slower_gets_more_time() -> None:
    """Each missed deadline doubles the next, so a slow node is not asked for ever in vain."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = lambda _step, count: Slow(5.0) if count >= 5 else None
        await check(mesh)


async def test_a_frozen_node_is_noticed_within_seconds_and_comes_back() -> None:
    """As by SIGSTOP and SIGCONT: silence closes the link, and the node is found again."""
    async with scripted_mesh() as mesh:
        frozen = mesh.nodes[1]
        async with mesh.generator.generation(mesh.request()) as tokens:
            seen = [(await mesh.drive(anext(tokens))).id for _ in range(3)]
            frozen.stalled = True
            following = asyncio.ensure_future(anext(tokens))
            started_s = mesh.clock.monotonic()
            await mesh.until(lambda: mesh.mesh.link("b") is None)
            assert mesh.clock.monotonic() - started_s <= SILENCE_MAX_S + TICK_S
            frozen.resume()
            seen.append((await mesh.drive(following)).id)
            seen += [(await mesh.drive(anext(tokens))).id for _ in range(4)]
        await idle()
        assert seen == expected()
        mesh.assert_nothing_left()


async def test_two_hops_lost_at_once() -> None:
    """Each is rebuilt when its turn comes; the third is not touched."""
    async with scripted_mesh() as mesh:
        async with mesh.generator.generation(mesh.request()) as tokens:
            seen = [(await mesh.drive(anext(tokens))).id for _ in range(3)]
            mesh.nodes[0].restart()
            mesh.nodes[2].restart()
            seen += [(await mesh.drive(anext(tokens))).id for _ in range(5)]
        await idle()
        assert seen == expected()
        assert mesh.prefills() == [2, 1, 2]
        mesh.assert_nothing_left()


@pytest.mark.parametrize("fate", [Miss(), Cut(), Crash(0.5), Drop(), Fail("internal_error"), Fail("stale_epoch")])
@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_a_failure_during_a_replay(hop: int, fate: Fate) -> None:
    """In the replay's second chunk: it begins again."""
    async with scripted_mesh() as mesh:
        mesh.nodes[hop].script = _miss_then(8, 10, fate)
        await check(mesh, prompt_ids=LONG_PROMPT)
        untouched = [index for index in range(3) if index != hop]
        assert [mesh.prefills()[index] for index in untouched] == [1, 1]
        assert mesh.generator.totals.replays == 2


def _miss_then(miss_at: int, fail_at: int, fate: Fate) -> Script:
    return lambda _step, count: Miss() if count == miss_at else fate if count == fail_at else None


async def test_the_other_generation_is_not_disturbed() -> None:
    """Its steps, tokens and epochs are as if nothing had happened."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = lambda step, _count: Miss() if step.session == "s1" and step.step_index == 5 else None
        first, second = await mesh.drive(
            asyncio.gather(mesh.generate_with_figures(10), mesh.generate_with_figures(12, sampling=SEEDED))
        )
        await idle()
        assert first[0] == expected(10)
        assert second[0] == expected(12, sampling=SEEDED)
        assert first[1].figures.replays == 1
        assert second[1].figures.replays == 0
        assert all(step.epoch == 0 for node in mesh.nodes for step in node.seen if step.session == "s2")
        mesh.assert_nothing_left()


@pytest.mark.parametrize("hop", [1, 2])
async def test_without_a_journal_the_replay_starts_at_the_ids(hop: int) -> None:
    """All hops up to the lost one are prefilled; those after it are not."""
    async with scripted_mesh(journal_bytes_max=0) as mesh:
        mesh.nodes[hop].script = nth(5, Miss())
        await check(mesh)
        assert mesh.prefills() == [2 if index <= hop else 1 for index in range(3)]
        assert mesh.generator.totals.full_replays == 1
        assert mesh.generator.journal.drops > 0


async def test_the_replay_starts_at_the_nearest_whole_journal() -> None:
    """Only the last hop's was dropped."""
    async with scripted_mesh() as mesh:
        async with mesh.generator.generation(mesh.request()) as tokens:
            seen = [(await mesh.drive(anext(tokens))).id for _ in range(3)]
            generation = next(iter(mesh.generator.lifecycle.running.values()))
            generation.session.hops[2].journal.drop()  # type: ignore[attr-defined]
            mesh.nodes[2].sessions.clear()
            seen += [(await mesh.drive(anext(tokens))).id for _ in range(5)]
            assert generation.session.source_of(2) == 2, "the replay has filled the journal again"
        await idle()
        assert seen == expected()
        assert mesh.prefills() == [1, 2, 2]
        mesh.assert_nothing_left()


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("fate", [Miss(), Cut(), Crash(0.5), Fail("out_of_memory")])
async def test_a_failure_at_any_hop_of_a_full_replay(failing: int, fate: Fate) -> None:
    """It begins again from the ids, whichever hop failed."""
    async with scripted_mesh(journal_bytes_max=0) as mesh:
        met: list[Step] = []

        def fail_once(step: Step, _count: int) -> Fate | None:
            if step.epoch == 1 and step.cache == "decode" and not met:
                met.append(step)
                return fate
            return None

        mesh.nodes[failing].script = fail_once
        other = mesh.nodes[2]
        script = other.script
        other.script = lambda step, count: Miss() if count == 6 else script(step, count)
        await check(mesh, prompt_ids=LONG_PROMPT)
        assert len(met) == 1


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("hops", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
async def test_nodes_without_a_cache(hops: tuple[int, ...], announced: bool) -> None:
    """They are given everything at each step, their neighbours only what is new."""
    options = {hop: {"caches": False, "kv_cache": not announced} for hop in hops}
    async with scripted_mesh(node_options=options) as mesh:
        await check(mesh)
        for index, node in enumerate(mesh.nodes):
            assert (node.steps["decode"] == 0) is (index in hops)
            assert node.steps["prefill"] == (0 if index in hops else 1)


async def test_a_node_that_says_disabled_is_served_without_a_cache_from_then_on() -> None:
    """Caching was switched off while a session was held."""
    async with scripted_mesh() as mesh:
        async with mesh.generator.generation(mesh.request()) as tokens:
            seen = [(await mesh.drive(anext(tokens))).id for _ in range(3)]
            mesh.nodes[1].caches = False
            mesh.nodes[1].sessions.clear()
            seen += [(await mesh.drive(anext(tokens))).id for _ in range(5)]
            assert tokens.figures.misses == {"disabled": 1}
        await idle()
        assert seen == expected()
        assert mesh.nodes[1].steps["stateless"] == 5
        mesh.assert_nothing_left()


@pytest.mark.parametrize("hops", [(1,), (2,), (0, 2), (0, 1, 2)])
async def test_nodes_without_a_cache_and_no_journal(hops: tuple[int, ...]) -> None:
    """The inputs are produced anew for every step: slow, and right."""
    options = {hop: {"caches": False} for hop in hops}
    async with scripted_mesh(node_options=options, journal_bytes_max=0) as mesh:
        await check(mesh, prompt_ids=LONG_PROMPT)


@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_a_miss_beside_a_node_without_a_cache(hop: int) -> None:
    """Both at once, with journals and without."""
    for journal_bytes_max in (1 << 30, 0):
        async with scripted_mesh(node_options={1: {"caches": False}}, journal_bytes_max=journal_bytes_max) as mesh:
            mesh.nodes[hop].script = nth(5, Miss())
            await check(mesh, prompt_ids=LONG_PROMPT)


async def test_a_session_that_outgrows_a_nodes_cache_goes_on_without_it() -> None:
    """At the old cost, with the right tokens."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = lambda step, _count: (
            Fail("kv_budget_exceeded") if step.cache and step.past_len + step.new_len > 9 else None
        )
        await check(mesh)
        assert mesh.nodes[1].steps["stateless"] == 3


@pytest.mark.parametrize("announced", [True, False])
async def test_a_tail_that_returns_text(announced: bool) -> None:
    """Every token is a prefill of everything, over the whole route; the ids come from the text."""
    async with scripted_mesh(node_options={2: {"text_tail": True, "token_ids": not announced}}) as mesh:
        await check(mesh)
        assert mesh.prefills() == [8, 8, 8]


async def test_a_tail_that_returns_text_and_a_miss() -> None:
    """In the second chunk of one of its prefills."""
    async with scripted_mesh(node_options={2: {"text_tail": True}}) as mesh:
        mesh.nodes[1].script = nth(5, Miss())
        await check(mesh)


async def test_hidden_states_of_another_rank() -> None:
    """Several residual streams travel as they are and are joined where their lengths tell the axis."""
    options = {hop: {"streams": True} for hop in range(3)}
    async with scripted_mesh(node_options=options) as mesh:
        mesh.nodes[1].script = nth(6, Miss())
        mesh.nodes[2].script = nth(8, Miss())
        await check(mesh, 10)
        assert mesh.generator.totals.full_replays == 0


async def test_hidden_states_whose_axis_is_unclear_are_replayed_from_the_ids() -> None:
    """A prompt of one token: every piece is one position long, and so are two axes."""
    options = {hop: {"streams": True} for hop in range(3)}
    async with scripted_mesh(node_options=options) as mesh:
        mesh.nodes[2].script = nth(4, Miss())
        await check(mesh, prompt_ids=(7,))
        assert mesh.generator.totals.full_replays == 1


@pytest.mark.parametrize("code", ["bad_step", "out_of_memory", "internal_error", "non_finite_logits"])
async def test_a_step_that_keeps_failing_ends_the_generation_with_its_code(code: str) -> None:
    """After a bounded number of attempts, and nothing is left behind."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = lambda _step, count: Fail(code) if count >= 5 else None
        with pytest.raises(GenerationFailed) as failure:
            await mesh.drive(mesh.generate())
        await idle()
        assert failure.value.code == code
        assert mesh.nodes[1].seen[5:] == mesh.nodes[1].seen[5 : 5 + 1 + REFUSALS_PER_PASS_MAX]
        assert mesh.generator.totals.outcomes["failed"] == 1
        mesh.assert_nothing_left()


@pytest.mark.parametrize(
    "code", ["bad_step", "out_of_memory", "duplicate_step", "cancelled", "queue_full", "not_ready"]
)
async def test_a_passing_error_is_survived(code: str) -> None:
    """The hop is rebuilt, and the step succeeds."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = nth(5, Fail(code), Fail(code))
        await check(mesh)


async def test_out_of_memory_moves_the_hop_to_a_replica() -> None:
    """It has no reason to run out as well."""
    async with scripted_mesh(REPLICAS) as mesh:
        mesh.nodes[1].script = lambda _step, count: Fail("out_of_memory") if count >= 5 else None
        await check(mesh)
        assert mesh.nodes[4].steps["prefill"] == 1


async def test_a_draining_node_hands_over() -> None:
    """It serves what it holds, and takes no replay; its replica does."""
    async with scripted_mesh(REPLICAS) as mesh:
        mesh.nodes[1].script = nth(5, Miss(), *[Fail("draining")] * 20)
        await check(mesh)
        assert mesh.nodes[4].steps["prefill"] == 1


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda message, _tensors: (message, {}), id="no hidden states"),
        pytest.param(
            lambda message, tensors: (
                StepResult(session=message.session, step_index=message.step_index, epoch=message.epoch),
                tensors,
            ),
            id="no token",
        ),
    ],
)
async def test_a_useless_answer_is_asked_again(change: object) -> None:
    """A node's nonsense is a failure of its step, not of the gateway."""
    async with scripted_mesh() as mesh:
        for node in mesh.nodes[1:]:
            node.script = nth(5, Mangle(change))  # type: ignore[arg-type]
        await check(mesh)


def with_a_position_more(message: Message, tensors: dict[str, WireTensor]) -> tuple[Message, dict[str, WireTensor]]:
    """The answer of a node that counts wrongly."""
    return message, {"hidden_states": write_hidden([*read_hidden(tensors["hidden_states"]), 0])}


def outside_the_vocabulary(message: Message, tensors: dict[str, WireTensor]) -> tuple[Message, dict[str, WireTensor]]:
    """The answer of a node that draws a token which the model does not have; others have none to draw."""
    assert isinstance(message, StepResult)
    return (replace(message, token_ids=(VOCAB_SIZE,)) if message.token_ids else message), tensors


@pytest.mark.parametrize(
    ("cuts", "liar", "change"),
    [
        pytest.param(("0:2", "2:4", "2:4", "4:6"), 1, with_a_position_more, id="positions"),
        pytest.param(("0:2", "2:4", "4:6", "4:6"), 2, outside_the_vocabulary, id="token"),
    ],
)
@pytest.mark.parametrize("number", [0, 4])
async def test_a_replica_takes_the_place_of_a_node_that_lies(
    cuts: tuple[str, ...], liar: int, change: Change, number: int
) -> None:
    """From the first step or in mid-decode; nobody else is blamed for what it said."""
    async with scripted_mesh(cuts) as mesh:
        mesh.nodes[liar].script = lambda _step, count: Mangle(change) if count >= number else None
        tokens, stream = await mesh.drive(mesh.generate_with_figures())
        await idle()
        assert tokens == expected()
        mesh.assert_nothing_left()
        assert mesh.prefills() == [1] * len(cuts)
        assert stream.figures.failures == {"bad_answer": 1}
        assert stream.figures.moves == 1


async def test_a_node_of_another_range_is_not_asked_again() -> None:
    """It changed its range under a running generation; the replica did not."""
    async with scripted_mesh(REPLICAS) as mesh:
        mesh.nodes[1].script = lambda _step, count: Miss("range_mismatch") if count >= 5 else None
        await check(mesh)
        assert mesh.nodes[4].steps["prefill"] == 1


async def test_a_node_that_does_not_come_back_ends_the_generation_in_time() -> None:
    """Neither earlier nor later than the failover timeout."""
    async with scripted_mesh(failover_timeout_s=12.0) as mesh:
        mesh.nodes[1].script = nth(5, Crash(back_after_s=None))
        started_s = mesh.clock.monotonic()
        with pytest.raises(GenerationFailed) as failure:
            await mesh.drive(mesh.generate())
        await idle()
        assert failure.value.code == "node_lost"
        assert "2:4" in failure.value.message
        assert mesh.clock.monotonic() - started_s == pytest.approx(12.0)
        assert [node.sessions for node in mesh.nodes] == [{}, {}, {}]


async def test_time_without_a_node_adds_up_within_a_pass() -> None:
    """A node that comes and goes does not restart the timeout."""
    async with scripted_mesh(failover_timeout_s=10.0) as mesh:
        mesh.nodes[1].script = lambda _step, count: Crash(back_after_s=6.0) if count >= 5 else None
        with pytest.raises(GenerationFailed) as failure:
            await mesh.drive(mesh.generate())
        assert failure.value.code == "node_lost"


async def test_recoveries_without_progress_are_bounded() -> None:
    """A node that misses every replay is not asked for ever."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = lambda _step, count: Miss() if count >= 5 else None
        with pytest.raises(GenerationFailed) as failure:
            await mesh.drive(mesh.generate())
        assert failure.value.code == "no_progress"
        assert len(mesh.nodes[1].seen) == 5 + 1 + RECOVERIES_PER_PASS_MAX


async def test_progress_resets_the_bounds() -> None:
    """A miss at every single token is slow, and no reason to give up."""
    missed: set[int] = set()

    def miss_once(step: Step, _count: int) -> Fate | None:
        if step.cache != "decode" or step.past_len < len(PROMPT) or step.past_len in missed:
            return None
        missed.add(step.past_len)
        return Miss()

    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = miss_once
        await check(mesh, 20)
        assert mesh.generator.totals.replays == len(missed) > 15


async def test_a_step_that_no_frame_can_hold_ends_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is on our side; asking again would not help."""
    send = ScriptedLink.send

    async def refuse(link: ScriptedLink, message: Message, tensors: Mapping[str, WireTensor] | None = None) -> None:
        if isinstance(message, Step) and message.step_index == 4:
            raise FrameError("payload_too_large", "over the limit")
        await send(link, message, tensors)

    monkeypatch.setattr(ScriptedLink, "send", refuse)
    async with scripted_mesh() as mesh:
        with pytest.raises(GenerationFailed) as failure:
            await mesh.drive(mesh.generate())
        await idle()
        assert failure.value.code == "payload_too_large"
        mesh.assert_nothing_left()


async def test_a_replica_frees_a_place_and_the_hop_moves_there() -> None:
    """The only replica is full when the node is lost; when its session ends, the waiting one takes over."""
    async with scripted_mesh(["0:6", "0:6"], node_options={1: {"sessions_max": 1}}) as mesh:
        mesh.nodes[0].script = nth(3, Crash(back_after_s=None))
        first = asyncio.ensure_future(mesh.generate(8))
        holder = mesh.generator.generation(mesh.request(4))
        tokens = await mesh.drive(holder.__aenter__())
        await mesh.drive(anext(tokens))
        await mesh.drive(mesh.clock.sleep(5))
        assert not first.done()
        await holder.__aexit__(None, None, None)
        assert await mesh.drive(first) == expected()
        await idle()
        assert mesh.nodes[1].sessions == {}


async def test_figures_tell_what_happened() -> None:
    """For the request's log line."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = nth(3, Miss(), Cut())
        tokens, stream = await mesh.drive(mesh.generate_with_figures())
        figures = stream.figures
        assert tokens == expected()
        assert figures.passes == len(PROMPT) // 4 + len(tokens)
        assert figures.misses == {"evicted": 1}
        assert figures.failures == {"connection_lost": 1}
        assert figures.replays == 2
        assert figures.recovering_s > 0
        assert stream.is_complete


async def test_a_stream_that_lost_its_node_gets_a_place_before_those_that_have_not_begun() -> None:
    """The replica has one place: who holds it, ends; then the stream under way goes on, and then the others begin."""
    one_place = {"sessions_max": 1}
    options = {1: one_place, 3: one_place}
    async with scripted_mesh(("0:2", "2:4", "4:6", "2:4"), node_options=options, queue_timeout_s=600.0) as mesh:
        for node in mesh.nodes:
            node.step_s = 0.1
        first, second = (asyncio.ensure_future(mesh.generate(max_tokens)) for max_tokens in (40, 20))
        await mesh.until(lambda: all(mesh.nodes[index].sessions for index in (1, 3)))
        queued = [asyncio.ensure_future(mesh.generate(20)) for _ in range(3)]
        loses = mesh.nodes[1] if "s1" in mesh.nodes[1].sessions else mesh.nodes[3]
        loses.stop()
        answers = await mesh.drive(asyncio.gather(first, second, *queued))
        assert answers == [expected(40), expected(20), expected(20), expected(20), expected(20)]
        keeps = mesh.nodes[3] if loses is mesh.nodes[1] else mesh.nodes[1]
        order = list(dict.fromkeys(step.session for step in keeps.seen))
        assert order == ["s2", "s1", "s3", "s4", "s5"]
        await idle()
        mesh.assert_nothing_left()
