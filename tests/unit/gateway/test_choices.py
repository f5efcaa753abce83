"""Requests with several choices: one prefill for all, waves where not all fit, and nothing left of any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.choice import ChoiceStream
from gateway.choice_lanes import LANE_TOKENS_MAX
from gateway.errors import GenerationFailed
from shared.messages import Cancel, Release, SamplingParams, Step
from tests.support.memory_mesh import PROMPT, ScriptedMesh, expected, idle, scripted_mesh, seeded
from tests.support.scripted_node import Crash, Cut, Drop, Fail, Fate, Late, Miss, Slow, nth

LONG_PROMPT = tuple(range(100, 119))
REPLICAS = ("0:2", "2:4", "4:6", "0:2", "2:4", "4:6")


def alone(choices: tuple[SamplingParams, ...], max_tokens: int = 8, **fields: object) -> list[list[int]]:
    """What each choice gives when it is the only one."""
    return [expected(max_tokens, sampling=sampling, **fields) for sampling in choices]


async def check(mesh: ScriptedMesh, choices: tuple[SamplingParams, ...], max_tokens: int = 8, **fields: object) -> None:
    """Generate, compare each choice with itself alone, and look for what is left."""
    answers = await mesh.drive(mesh.generate_choices(max_tokens, choices=choices, **fields))
    await idle()
    assert answers == alone(choices, max_tokens, **fields)
    mesh.assert_nothing_left()


async def test_choices_share_one_prefill() -> None:
    """Each node is prefilled once, copies the session for each other choice, and releases them all."""
    async with scripted_mesh() as mesh:
        await check(mesh, seeded(1, 2, 3))
        assert mesh.prefills() == [1, 1, 1]
        for node in mesh.nodes:
            assert [(fork.session, fork.target, fork.past_len) for fork in node.forks] == [
                ("s1", "s2", len(PROMPT) - 1),
                ("s1", "s3", len(PROMPT) - 1),
            ]
            assert sorted(message.session for message in node.ended if isinstance(message, Release)) == [
                "s1",
                "s2",
                "s3",
            ]
        assert mesh.generator.totals.misses == 0
        assert mesh.generator.totals.outcomes == {"started": 3, "completed": 3}


@pytest.mark.parametrize("prompt_len", [1, 2, 4, 5, 6, 19])
@pytest.mark.parametrize("cuts", [["0:6"], ["0:1", "1:6"], ["0:2", "2:4", "4:6"]])
async def test_choices_do_not_depend_on_how_prompt_and_model_are_cut(prompt_len: int, cuts: list[str]) -> None:
    """A single token leaves nothing to share."""
    async with scripted_mesh(cuts) as mesh:
        await check(mesh, seeded(7, 8, 7), prompt_ids=tuple(range(prompt_len)))
        assert [len(node.forks) for node in mesh.nodes] == [0 if prompt_len == 1 else 2] * len(cuts)


async def test_first_tokens_come_in_order_and_the_rest_as_they_are_made() -> None:
    """The second choice's answers travel for long: the third has its own before, and waits to begin."""
    async with scripted_mesh(["0:6"]) as mesh:
        mesh.nodes[0].script = lambda step, _count: Late(1.0) if step.session == "s2" else None
        order: list[int] = []
        async with mesh.generator.generation(mesh.request(4, choices=seeded(1, 2, 3))) as tokens:
            while (token := await mesh.drive(anext(tokens, None))) is not None:
                order.append(token.choice)
        assert order == [0] * 4 + [1] + [2] * 4 + [1] * 3


async def test_choices_run_concurrently() -> None:
    """Four slow choices take hardly longer than one on nodes that serve them in turn."""
    async with scripted_mesh(["0:3", "3:6"], node_options={0: {"step_s": 1.0}, 1: {"step_s": 1.0}}) as mesh:
        started_s = mesh.clock.monotonic()
        await check(mesh, seeded(1, 2), 8)
        took_s = mesh.clock.monotonic() - started_s
        assert took_s < 2 * 8 * 2, "one after the other"


@pytest.mark.parametrize("without", [(0,), (1,), (2,), (0, 1, 2)])
async def test_nodes_that_cannot_fork_are_not_asked_to(without: tuple[int, ...]) -> None:
    """The copy's first decode is a miss there, and the hop is replayed."""
    async with scripted_mesh(node_options={hop: {"features": ("score",)} for hop in without}) as mesh:
        await check(mesh, seeded(1, 2))
        assert mesh.prefills() == [2 if index in without else 1 for index in range(3)]
        assert mesh.generator.totals.misses == len(without)


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("journal_bytes_max", [1 << 30, 0])
async def test_a_fork_that_came_to_nothing_is_an_ordinary_miss(hop: int, journal_bytes_max: int) -> None:
    """With a journal that hop alone is rebuilt."""
    async with scripted_mesh(journal_bytes_max=journal_bytes_max) as mesh:
        mesh.nodes[hop].loses_fork = lambda fork: fork.target == "s3"
        await check(mesh, seeded(1, 2, 3), prompt_ids=LONG_PROMPT)
        if journal_bytes_max:
            assert mesh.prefills() == [2 if index == hop else 1 for index in range(3)]


@pytest.mark.parametrize("hops", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("announced", [True, False])
async def test_choices_over_nodes_without_a_cache(hops: tuple[int, ...], announced: bool) -> None:
    """They keep nothing that could be copied, and are given everything for each choice."""
    options = {hop: {"caches": False, "kv_cache": not announced} for hop in hops}
    async with scripted_mesh(node_options=options) as mesh:
        await check(mesh, seeded(1, 2, 3))


async def test_choices_of_a_tail_that_returns_text() -> None:
    """Every token is a prefill of everything, for each choice."""
    async with scripted_mesh(node_options={2: {"text_tail": True}}) as mesh:
        await check(mesh, seeded(1, 2))


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("fate", [Miss(), Cut(), Crash(1.0), Drop(), Fail("internal_error")])
@pytest.mark.parametrize("number", [0, 1, 4])
async def test_choices_survive_what_happens_to_a_node(hop: int, fate: Fate, number: int) -> None:
    """During the shared prefill and after it, whichever choice is met."""
    async with scripted_mesh() as mesh:
        mesh.nodes[hop].script = nth(number, fate)
        await check(mesh, seeded(1, 2, 3))


async def test_a_copy_may_move_without_the_others() -> None:
    """Its hop goes to a replica; the first choice stays."""
    async with scripted_mesh(REPLICAS) as mesh:
        mesh.nodes[1].script = lambda step, _count: (
            Fail("out_of_memory") if step.session == "s2" and step.past_len > 6 else None
        )
        await check(mesh, seeded(1, 2))
        assert {step.session for step in mesh.nodes[4].seen} == {"s2"}


# --- waves --------------------------------------------------------------------------------------


async def test_more_choices_than_places_run_in_waves() -> None:
    """Three, three and one, each wave with a prefill of its own."""
    async with scripted_mesh(node_options={1: {"sessions_max": 3}}) as mesh:
        await check(mesh, seeded(*range(7)), 3)
        assert mesh.prefills() == [3, 3, 3]
        assert [len(node.forks) for node in mesh.nodes] == [4, 4, 4]


async def test_a_wave_is_as_many_as_an_empty_mesh_has_memory_for() -> None:
    """Bytes count as slots do."""
    async with scripted_mesh(node_options={1: {"bytes_max": 2 * 256 * 10}}) as mesh:
        await check(mesh, seeded(*range(4)))
        assert mesh.prefills() == [2, 2, 2]


async def test_two_requests_that_do_not_fit_together_run_one_after_the_other() -> None:
    """Each waits for all the places of its wave, and holds none meanwhile."""
    async with scripted_mesh(["0:6"], node_options={0: {"sessions_max": 4}}) as mesh:
        first, second = seeded(1, 2, 3), seeded(4, 5, 6, 7, 8, 9)
        asking = asyncio.gather(mesh.generate_choices(choices=first), mesh.generate_choices(choices=second))
        assert await mesh.drive(asking) == [alone(first), alone(second)]
        await idle()
        mesh.assert_nothing_left()


async def test_a_request_that_has_begun_comes_before_those_that_have_not() -> None:
    """Its second wave does not queue behind a newcomer, and no full queue refuses it."""
    async with scripted_mesh(["0:6"], node_options={0: {"sessions_max": 1, "step_s": 0.1}}, queue_max=1) as mesh:
        first = asyncio.ensure_future(mesh.generate_choices(choices=seeded(1, 2)))
        await mesh.until(lambda: bool(mesh.nodes[0].seen))
        newcomer = asyncio.ensure_future(mesh.generate(1))
        assert await mesh.drive(first) == alone(seeded(1, 2))
        assert not newcomer.done()
        assert await mesh.drive(newcomer) == expected(1)


async def test_a_second_wave_without_a_route_fails_the_request() -> None:
    """The only node drains meanwhile: what it holds it serves, and takes nothing new."""
    options = {0: {"sessions_max": 1, "step_s": 0.5}}
    async with scripted_mesh(["0:6"], node_options=options, failover_timeout_s=12.0) as mesh:
        async with mesh.generator.generation(mesh.request(3, choices=seeded(1, 2))) as tokens:
            await mesh.drive(anext(tokens))
            mesh.nodes[0].state = "draining"
            mesh.nodes[0].become(mesh.nodes[0].info)
            started_s = mesh.clock.monotonic()
            with pytest.raises(GenerationFailed, match="draining") as failure:
                await mesh.drive(_rest(tokens))
        assert failure.value.code == "no_route"
        assert mesh.clock.monotonic() - started_s == pytest.approx(12.0)
        await idle()
        mesh.assert_nothing_left()


async def _rest(tokens: ChoiceStream) -> list[int]:
    return [token.id async for token in tokens]


# --- leaving ------------------------------------------------------------------------------------


async def test_finishing_one_choice_releases_it_and_leaves_the_others() -> None:
    """Nothing more of it is computed or given out."""
    choices = seeded(1, 2, 3)
    async with scripted_mesh() as mesh:
        answers: list[list[int]] = [[], [], []]
        async with mesh.generator.generation(mesh.request(30, choices=choices)) as tokens:
            while (token := await mesh.drive(anext(tokens, None))) is not None:
                answers[token.choice].append(token.id)
                if token.choice == 1 and len(answers[1]) == 3:
                    tokens.finish(1)
                    await idle()
                    assert all(Release(session="s2") in node.ended for node in mesh.nodes)
                    assert all("s2" not in node.sessions for node in mesh.nodes)
                    seen = [len([step for step in node.seen if step.session == "s2"]) for node in mesh.nodes]
            assert tokens.is_complete
        await idle()
        whole = alone(choices, 30)
        assert answers == [whole[0], whole[1][:3], whole[2]]
        assert [len([step for step in node.seen if step.session == "s2"]) for node in mesh.nodes] == seen
        assert not any(isinstance(message, Cancel) for node in mesh.nodes for message in node.ended)
        mesh.assert_nothing_left()


async def test_finishing_all_choices_ends_the_stream() -> None:
    """At once, a choice that has not begun included."""
    async with scripted_mesh(["0:6"], node_options={0: {"sessions_max": 2}}) as mesh:
        async with mesh.generator.generation(mesh.request(50, choices=seeded(1, 2, 3))) as tokens:
            await mesh.drive(anext(tokens))
            for choice in range(3):
                tokens.finish(choice)
            assert await mesh.drive(anext(tokens, None)) is None
            assert tokens.is_complete
        await idle()
        assert mesh.prefills() == [1]
        assert not any(isinstance(message, Cancel) for message in mesh.nodes[0].ended)
        mesh.assert_nothing_left()


async def test_finishing_the_first_choice_before_it_begins_lets_the_others_begin() -> None:
    """While the shared prefill runs; the copies are made all the same."""
    async with scripted_mesh(["0:6"], node_options={0: {"step_s": 1.0}}) as mesh:
        async with mesh.generator.generation(mesh.request(3, choices=seeded(1, 2))) as tokens:
            await idle()
            tokens.finish(0)
            answer = [(token.choice, token.id) for token in await mesh.drive(_collect(tokens))]
        assert answer == [(1, token_id) for token_id in expected(3, sampling=seeded(2)[0])]
        assert mesh.prefills() == [1]
        await idle()
        mesh.assert_nothing_left()


async def _collect(tokens: ChoiceStream) -> list[object]:
    return [token async for token in tokens]


@pytest.mark.parametrize("choice", [-1, 2])
async def test_finishing_a_choice_that_does_not_exist_is_a_fault_of_ours(choice: int) -> None:
    """For one choice and for several."""
    async with scripted_mesh(["0:6"]) as mesh:
        for choices in (seeded(1), seeded(1, 2)):
            async with mesh.generator.generation(mesh.request(3, choices=choices)) as tokens:
                with pytest.raises(ValueError, match="there is no choice"):
                    tokens.finish(choice)


@pytest.mark.parametrize(
    "moment",
    [
        lambda mesh: bool(mesh.nodes[0].seen),
        lambda mesh: bool(mesh.nodes[2].forks),
        lambda mesh: any(step.session == "s3" for step in mesh.nodes[2].seen),
        lambda mesh: any(step.past_len > 8 for step in mesh.nodes[1].seen),
    ],
)
async def test_a_client_that_leaves_leaves_nothing_behind(moment: Callable[[ScriptedMesh], bool]) -> None:
    """During the shared prefill, at the forks, and while choices decode."""
    async with scripted_mesh(node_options={hop: {"step_s": 0.1} for hop in range(3)}) as mesh:
        asking = asyncio.ensure_future(mesh.generate_choices(choices=seeded(1, 2, 3)))
        await mesh.until(lambda: moment(mesh))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await idle()
        sent = sum(len(node.seen) for node in mesh.nodes)
        await mesh.drive(mesh.clock.sleep(10))
        assert sum(len(node.seen) for node in mesh.nodes) - sent <= len(mesh.nodes), "only what was under way"
        mesh.assert_nothing_left()


async def test_a_client_leaves_while_the_second_wave_waits() -> None:
    """Its demand leaves the queue with it."""
    async with scripted_mesh(["0:6"], node_options={0: {"sessions_max": 2}}) as mesh:
        async with mesh.generator.generation(mesh.request(40, choices=seeded(1, 2, 3))) as tokens:
            await mesh.drive(anext(tokens))
            assert mesh.generator.admission.queued == 1
        await idle()
        mesh.assert_nothing_left()


async def test_a_choice_that_fails_ends_the_request() -> None:
    """The others are cancelled everywhere, and the reader is told once."""
    async with scripted_mesh(node_options={0: {"step_s": 0.5}}) as mesh:

        def fail(step: Step, _count: int) -> Fate | None:
            return Fail("bad_step") if step.session == "s2" and step.past_len > 6 else None

        mesh.nodes[1].script = fail
        async with mesh.generator.generation(mesh.request(40, choices=seeded(1, 2, 3))) as tokens:
            with pytest.raises(GenerationFailed) as failure:
                await mesh.drive(_rest(tokens))
            assert await mesh.drive(anext(tokens, None)) is None
            assert not tokens.is_complete
        await idle()
        assert failure.value.code == "bad_step"
        assert mesh.generator.totals.outcomes == {"started": 3, "failed": 1, "cancelled": 2}
        mesh.assert_nothing_left()


async def test_a_reader_that_does_not_read_stops_the_choices() -> None:
    """Nothing runs further ahead than a lane holds."""
    async with scripted_mesh(["0:6"]) as mesh:
        async with mesh.generator.generation(mesh.request(200, choices=seeded(1, 2))) as tokens:
            await mesh.drive(mesh.clock.sleep(5))
            assert max(step.past_len for step in mesh.nodes[0].seen) <= len(PROMPT) + LANE_TOKENS_MAX + 1
            assert (await mesh.drive(anext(tokens))).choice == 0
        await idle()
        mesh.assert_nothing_left()


async def test_a_reader_that_is_interrupted_may_go_on() -> None:
    """The choices are computed elsewhere."""
    async with scripted_mesh(["0:6"]) as mesh:
        mesh.nodes[0].script = nth(1, Slow(5.0))
        async with mesh.generator.generation(mesh.request(3, choices=seeded(1, 2))) as tokens:
            waiting = asyncio.ensure_future(anext(tokens))
            await idle()
            waiting.cancel()
            await idle()
            assert len(await mesh.drive(_rest(tokens))) == 6


async def test_the_end_of_sequence_ends_one_choice() -> None:
    """The other goes on to its last token."""
    choices = seeded(1, 2)
    eos_ids = frozenset({expected(20, sampling=choices[0])[4]})
    async with scripted_mesh() as mesh:
        await check(mesh, choices, 20, eos_ids=eos_ids)


async def test_figures_add_up_and_no_task_is_left() -> None:
    """Over all choices."""
    async with scripted_mesh() as mesh:
        before = len(asyncio.all_tasks())
        mesh.nodes[1].script = nth(5, Miss())
        async with mesh.generator.generation(mesh.request(4, choices=seeded(1, 2))) as tokens:
            await mesh.drive(_rest(tokens))
            assert tokens.figures.passes == 1 + 2 * 4
            assert tokens.figures.misses == {"evicted": 1}
        await idle()
        assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize("room", [1, 2])
async def test_a_choice_goes_where_its_leader_moved_only_if_there_is_room(room: int) -> None:
    """The leader moves to a replica while it computes the prompt; without a place there, the others begin anew."""
    cuts = ("0:2", "2:4", "4:6", "2:4")
    async with scripted_mesh(cuts, node_options={3: {"sessions_max": room}}) as mesh:
        mesh.nodes[1].script = nth(0, Fail("out_of_memory"))
        await check(mesh, seeded(1, 2))
        at_replica = {step.session for step in mesh.nodes[3].seen}
        assert at_replica == ({"s1"} if room == 1 else {"s1", "s2"})
        assert len(mesh.nodes[3].forks) == room - 1
