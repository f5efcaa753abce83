"""Generations that nothing goes wrong with, the queue before them, and what is left after them."""

from __future__ import annotations

import asyncio
import gc
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from gateway.choice import ChoiceStream
from gateway.errors import AdmissionRefused, GenerationFailed, NotReady
from gateway.generation import create_generator
from gateway.generation_request import GenerationRequest
from gateway.mesh import create_mesh
from shared.messages import Cancel, Message, Release, SamplingParams, StepResult
from tests.support.memory_mesh import GREEDY, PROMPT, SEEDED, ScriptedMesh, expected, idle, scripted_mesh
from tests.support.scripted_node import Crash, Mangle, Miss, Slow, nth

Entered = tuple[AbstractAsyncContextManager[ChoiceStream], ChoiceStream]


async def enter(mesh: ScriptedMesh, max_tokens: int = 8) -> Entered:
    """A generation that has its place and its first token."""
    generation = mesh.generator.generation(mesh.request(max_tokens))
    tokens = await mesh.drive(generation.__aenter__())
    await mesh.drive(anext(tokens))
    return generation, tokens


async def leave(generation: AbstractAsyncContextManager[ChoiceStream]) -> None:
    """Leave it."""
    await generation.__aexit__(None, None, None)
    await idle()


@pytest.mark.parametrize("cuts", [["0:6"], ["0:1", "1:6"], ["0:2", "2:4", "4:6"], [f"{i}:{i + 1}" for i in range(6)]])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
async def test_tokens_do_not_depend_on_where_the_model_is_cut(cuts: list[str], sampling: SamplingParams) -> None:
    """One node or six: the reference's tokens, and every session released."""
    async with scripted_mesh(cuts) as mesh:
        assert await mesh.drive(mesh.generate(12, sampling=sampling)) == expected(12, sampling=sampling)
        await idle()
        mesh.assert_nothing_left()
        assert all(node.ended == [Release(session="s1")] for node in mesh.nodes)


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 9, 30])
async def test_tokens_do_not_depend_on_how_the_prompt_is_cut(prompt_len: int) -> None:
    """Chunks of 4: shorter, exact, and longer prompts."""
    prompt_ids = tuple(range(prompt_len))
    async with scripted_mesh() as mesh:
        assert await mesh.drive(mesh.generate(prompt_ids=prompt_ids)) == expected(prompt_ids=prompt_ids)
        assert mesh.prefills() == [1, 1, 1]
        assert sum(step.new_len == 4 for step in mesh.nodes[0].seen) == prompt_len // 4


async def test_the_end_of_sequence_ends_the_answer() -> None:
    """Its id is the last one given out, and the session is released, not cancelled."""
    eos_ids = frozenset({expected(20)[9]})
    async with scripted_mesh() as mesh:
        assert await mesh.drive(mesh.generate(20, eos_ids=eos_ids)) == expected(20)[:10]
        await idle()
        assert all(node.ended == [Release(session="s1")] for node in mesh.nodes)


async def test_one_token() -> None:
    """The prefill is all there is."""
    async with scripted_mesh() as mesh:
        assert await mesh.drive(mesh.generate(1)) == expected(1)
        assert [node.steps["decode"] for node in mesh.nodes] == [1, 1, 1]


async def test_reading_past_the_end_ends() -> None:
    """As any iterator."""
    async with scripted_mesh() as mesh, mesh.generator.generation(mesh.request(1)) as tokens:
        await mesh.drive(anext(tokens))
        with pytest.raises(StopAsyncIteration):
            await anext(tokens)


async def test_a_stream_that_was_interrupted_is_over() -> None:
    """A caller that gives up waiting for a token must not go on with half a pass; the session is cancelled."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = nth(2, Slow(5.0))
        generation, tokens = await enter(mesh)
        waiting = asyncio.ensure_future(anext(tokens))
        await idle()
        waiting.cancel()
        await idle()
        with pytest.raises(StopAsyncIteration):
            await anext(tokens)
        assert not tokens.is_complete
        await leave(generation)
        assert mesh.nodes[0].ended == [Cancel(session="s1")]


async def test_leaving_after_the_last_token_is_no_cancellation() -> None:
    """Without asking for the end: the reader counts too."""
    async with scripted_mesh() as mesh:
        async with mesh.generator.generation(mesh.request(2)) as tokens:
            await mesh.drive(anext(tokens))
            await mesh.drive(anext(tokens))
        await idle()
        assert all(node.ended == [Release(session="s1")] for node in mesh.nodes)


async def test_many_generations_at_once() -> None:
    """Each gets its own tokens, whatever the others do."""
    async with scripted_mesh() as mesh:
        requests = [{"prompt_ids": tuple(range(n, n + 7)), "sampling": SEEDED} for n in range(8)]
        answers = await mesh.drive(
            asyncio.gather(*(mesh.generate(10 + n, **fields) for n, fields in enumerate(requests)))
        )
        assert answers == [expected(10 + n, **fields) for n, fields in enumerate(requests)]
        await idle()
        mesh.assert_nothing_left()


async def test_a_tail_may_answer_with_a_text_of_several_tokens() -> None:
    """All of them are given out, and the next prefill contains them; the answer is cut where it must."""
    double = Mangle(lambda message, tensors: (_with_text(message, "<5><6>"), tensors))
    async with scripted_mesh(node_options={2: {"text_tail": True}}) as mesh:
        mesh.nodes[2].script = nth(1, double)
        tokens = await mesh.drive(mesh.generate(3))
        assert tokens == [5, 6, *expected(1, prompt_ids=(*PROMPT, 5, 6))]
        assert mesh.nodes[0].seen[-1].past_len + mesh.nodes[0].seen[-1].new_len == len(PROMPT) + 2


async def test_a_text_without_a_token_ends_the_generation() -> None:
    """Nothing could follow from it."""
    empty = Mangle(lambda message, tensors: (_with_text(message, ""), tensors))
    async with scripted_mesh(node_options={2: {"text_tail": True}}) as mesh:
        mesh.nodes[2].script = nth(1, empty)
        mesh.generator.encode_text = lambda _text: []
        with pytest.raises(GenerationFailed, match="bad_answer"):
            await mesh.drive(mesh.generate(3))


def _with_text(message: Message, text: str) -> Message:
    assert isinstance(message, StepResult)
    return replace(message, text=text)


async def test_finishing_ends_the_stream_and_releases() -> None:
    """A stop string: the reader needs no more."""
    async with scripted_mesh() as mesh:
        generation, tokens = await enter(mesh)
        tokens.finish(0)
        tokens.finish(0)
        with pytest.raises(StopAsyncIteration):
            await anext(tokens)
        assert tokens.is_complete
        await leave(generation)
        assert all(node.ended == [Release(session="s1")] for node in mesh.nodes)
        assert len(mesh.nodes[0].seen) == 2
        mesh.assert_nothing_left()


async def test_finishing_while_a_token_is_awaited_computes_it_no_further() -> None:
    """By another task than the one that reads, whose stream just ends."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = nth(2, Slow(5.0))
        generation, tokens = await enter(mesh)
        waiting = asyncio.ensure_future(anext(tokens, None))
        await mesh.drive(mesh.clock.sleep(1))
        tokens.finish(0)
        assert await mesh.drive(waiting) is None
        assert len(mesh.nodes[2].seen) == 2, "the last hop was not reached again"
        await leave(generation)
        assert all(node.ended == [Release(session="s1")] for node in mesh.nodes)
        await mesh.drive(mesh.clock.sleep(10))
        mesh.assert_nothing_left()


async def test_a_reader_cancelled_in_the_moment_of_finishing_is_cancelled() -> None:
    """Its own cancellation is not taken for ours."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = nth(2, Slow(5.0))
        generation, tokens = await enter(mesh)
        waiting = asyncio.ensure_future(anext(tokens, None))
        await idle()
        waiting.cancel()
        tokens.finish(0)
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        await leave(generation)


# --- waiting for a place ------------------------------------------------------------------------


async def test_generations_queue_in_order() -> None:
    """Two places, five callers: each starts when one before it has ended."""
    async with scripted_mesh(["0:6"], node_options={0: {"sessions_max": 2}}) as mesh:
        entered = [await enter(mesh) for _ in range(2)]
        order: list[int] = []

        async def wait(number: int) -> None:
            async with mesh.generator.generation(mesh.request(1)) as tokens:
                order.append(number)
                await anext(tokens)

        waiting = [asyncio.create_task(wait(number)) for number in range(3)]
        await idle()
        assert mesh.generator.admission.queued == 3
        assert order == []
        await leave(entered[0][0])
        await mesh.drive(asyncio.gather(*waiting))
        assert order == [0, 1, 2]
        await leave(entered[1][0])
        mesh.assert_nothing_left()


async def test_a_full_queue_refuses() -> None:
    """With 429 in mind: a time to come back."""
    async with scripted_mesh(["0:6"], node_options={0: {"sessions_max": 1}}, queue_max=1) as mesh:
        generation, _ = await enter(mesh)
        waiting = asyncio.create_task(mesh.generate(1))
        await idle()
        with pytest.raises(AdmissionRefused) as refusal:
            await mesh.drive(mesh.generate(1))
        assert refusal.value.code == "queue_full"
        assert refusal.value.retry_after_s is not None
        assert mesh.generator.totals.outcomes["refused"] == 1
        await leave(generation)
        assert await mesh.drive(waiting) == expected(1)


async def test_waiting_for_a_place_has_a_limit() -> None:
    """And then says so."""
    async with scripted_mesh(["0:6"], node_options={0: {"sessions_max": 1}}, queue_timeout_s=20.0) as mesh:
        generation, _ = await enter(mesh)
        started_s = mesh.clock.monotonic()
        with pytest.raises(AdmissionRefused, match="queue_timeout"):
            await mesh.drive(mesh.generate(1))
        assert mesh.clock.monotonic() - started_s == pytest.approx(20.0)
        await leave(generation)
        mesh.assert_nothing_left()


async def test_a_prompt_that_never_fits_is_refused_at_once() -> None:
    """For good: no time to come back."""
    async with scripted_mesh(["0:6"], node_options={0: {"bytes_max": 50}}) as mesh:
        with pytest.raises(AdmissionRefused) as refusal:
            await mesh.drive(mesh.generate(1))
        assert (refusal.value.code, refusal.value.retry_after_s) == ("session_too_large", None)
        mesh.assert_nothing_left()


async def test_without_a_route_the_wait_is_short() -> None:
    """A mesh that is not complete says what is missing."""
    async with scripted_mesh(route_wait_s=5.0) as mesh:
        mesh.nodes[1].stop()
        await idle()
        started_s = mesh.clock.monotonic()
        with pytest.raises(NotReady, match="layers 2:6 of 6 are not covered"):
            await mesh.drive(mesh.generate(1))
        assert mesh.clock.monotonic() - started_s == pytest.approx(5.0)
        mesh.assert_nothing_left()


async def test_a_route_that_becomes_complete_in_time_serves() -> None:
    """A node that restarts is no reason to refuse."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].stop()
        mesh.nodes[1]._start(mesh.nodes[1]._come_back(3.0))
        await idle()
        assert await mesh.drive(mesh.generate()) == expected()


async def test_who_waits_in_the_queue_when_the_route_is_lost_is_told() -> None:
    """The wait for a place turns into a wait for a node, which may take as long as a stream's under way."""
    options = {"route_wait_s": 4.0, "failover_timeout_s": 25.0}
    async with scripted_mesh(["0:6"], node_options={0: {"sessions_max": 1}}, **options) as mesh:
        generation, _ = await enter(mesh)
        waiting = asyncio.create_task(mesh.generate(1))
        await mesh.drive(mesh.clock.sleep(10))
        mesh.nodes[0].stop()
        lost_at_s = mesh.clock.monotonic()
        with pytest.raises(NotReady):
            await mesh.drive(waiting)
        assert mesh.clock.monotonic() - lost_at_s == pytest.approx(25.0)
        await leave(generation)


async def test_who_waits_in_the_queue_is_served_by_a_node_that_comes_back() -> None:
    """Later than a new request would wait for a route that is not complete."""
    async with scripted_mesh(["0:6"], node_options={0: {"sessions_max": 1}}, route_wait_s=4.0) as mesh:
        generation, _ = await enter(mesh)
        waiting = asyncio.create_task(mesh.generate(1))
        await mesh.drive(mesh.clock.sleep(10))
        mesh.nodes[0].stop()
        mesh.nodes[0]._start(mesh.nodes[0]._come_back(12.0))
        await leave(generation)
        assert await mesh.drive(waiting) == expected(1)


async def test_queue_time_is_told_apart() -> None:
    """From the time that the answer took."""
    async with scripted_mesh(["0:6"], node_options={0: {"sessions_max": 1}}) as mesh:
        generation, _ = await enter(mesh)
        waiting = asyncio.create_task(mesh.generate_with_figures(1))
        await mesh.drive(mesh.clock.sleep(7))
        await leave(generation)
        _, stream = await mesh.drive(waiting)
        assert stream.figures.queued_s == pytest.approx(7)


async def test_queue_time_is_told_apart_for_several_choices() -> None:
    """It is the request's, and not added up."""
    async with scripted_mesh(["0:6"], node_options={0: {"sessions_max": 2}}) as mesh:
        generation, _ = await enter(mesh)
        waiting = asyncio.create_task(mesh.generate_with_figures(1, choices=(GREEDY, SEEDED)))
        await mesh.drive(mesh.clock.sleep(7))
        await leave(generation)
        _, stream = await mesh.drive(waiting)
        assert stream.figures.queued_s == pytest.approx(7)


# --- leaving ------------------------------------------------------------------------------------


async def check_cancelled(mesh: ScriptedMesh, task: asyncio.Task[object]) -> None:
    """Cancel a task, and look whether every hop it may have touched has been told and holds nothing."""
    visited = [node for node in mesh.nodes if node.seen]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await idle()
    assert all(node.ended == [Cancel(session="s1")] for node in visited)
    await mesh.drive(mesh.clock.sleep(20))
    await mesh.until(lambda: all(link.is_open for link in mesh.mesh.links))
    mesh.assert_nothing_left()
    assert await mesh.drive(mesh.generate()) == expected(), "the mesh goes on"
    await idle()
    mesh.assert_nothing_left()


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("number", [0, 1, 4])
async def test_a_client_leaves_during_prefill_or_decode(hop: int, number: int) -> None:
    """While a hop computes: all hops are told, and the one that computes stops."""
    async with scripted_mesh() as mesh:
        mesh.nodes[hop].script = nth(number, Slow(5.0))
        task = asyncio.create_task(mesh.generate())
        await mesh.until(lambda: len(mesh.nodes[hop].seen) > number)
        await mesh.drive(mesh.clock.sleep(0.1))
        await check_cancelled(mesh, task)
        assert mesh.generator.totals.outcomes["cancelled"] == 1


async def test_a_client_leaves_during_a_replay() -> None:
    """While the lost hop is being rebuilt."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = lambda step, count: Miss() if count == 4 else Slow(5.0) if step.epoch else None
        task = asyncio.create_task(mesh.generate())
        await mesh.until(lambda: any(step.epoch for step in mesh.nodes[1].seen))
        await check_cancelled(mesh, task)


async def test_a_client_leaves_while_a_hop_has_no_node() -> None:
    """The others are told at once; the one that is gone holds nothing."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = nth(4, Crash(back_after_s=8.0))
        task = asyncio.create_task(mesh.generate())
        await mesh.drive(mesh.clock.sleep(2))
        assert not mesh.view.ready()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await idle()
        assert [node.ended for node in mesh.nodes] == [[Cancel(session="s1")], [], [Cancel(session="s1")]]
        await mesh.until(mesh.view.ready)
        mesh.assert_nothing_left()


async def test_a_client_leaves_while_the_link_is_down() -> None:
    """The process still holds the session; it is told when it is reached again."""
    async with scripted_mesh() as mesh:
        generation, _ = await enter(mesh)
        mesh.nodes[1].reachable = False
        mesh.nodes[1].cut()
        await idle()
        await leave(generation)
        assert list(mesh.nodes[1].sessions) == ["s1"]
        mesh.nodes[1].reachable = True
        await mesh.until(mesh.view.ready)
        await idle()
        mesh.assert_nothing_left()


async def test_a_client_leaves_after_its_hop_has_moved() -> None:
    """The node that stalled is told as well: it may hold the session."""
    async with scripted_mesh(["0:6", "0:6"]) as mesh:
        mesh.nodes[0].script = nth(3, Slow(60.0))
        generation, tokens = await enter(mesh)
        for _ in range(5):
            await mesh.drive(anext(tokens))
        await leave(generation)
        assert [len(node.ended) for node in mesh.nodes] == [2, 1], "once when the hop moved, once at the end"
        await mesh.drive(mesh.clock.sleep(100))
        mesh.assert_nothing_left()


async def test_a_client_leaves_the_queue() -> None:
    """The next in line is not held up, and nothing was sent for the one who left."""
    async with scripted_mesh(["0:6"], node_options={0: {"sessions_max": 1}}) as mesh:
        generation, _ = await enter(mesh)
        leaving = asyncio.create_task(mesh.generate(1))
        staying = asyncio.create_task(mesh.generate(1))
        await idle()
        leaving.cancel()
        await idle()
        assert mesh.generator.admission.queued == 1
        await leave(generation)
        assert await mesh.drive(staying) == expected(1)
        assert {step.session for step in mesh.nodes[0].seen} == {"s1", "s3"}
        await idle()
        mesh.assert_nothing_left()


async def test_a_client_leaves_in_the_moment_of_its_admission() -> None:
    """Its place is given back although it never saw it."""
    async with scripted_mesh(["0:6"], node_options={0: {"sessions_max": 1}}) as mesh:
        generation, _ = await enter(mesh)
        leaving = asyncio.create_task(mesh.generate(1))
        await idle()
        await generation.__aexit__(None, None, None)
        assert mesh.generator.admission.load() == {"a": 1}, "the place is the waiting one's"
        leaving.cancel()
        await idle()
        mesh.assert_nothing_left()


async def test_a_client_that_leaves_early_cancels() -> None:
    """By leaving the block: the session is not merely released."""
    async with scripted_mesh() as mesh:
        generation, _ = await enter(mesh)
        await leave(generation)
        assert all(node.ended == [Cancel(session="s1")] for node in mesh.nodes)
        mesh.assert_nothing_left()


async def test_an_error_of_the_reader_passes_through() -> None:
    """Cleaning up does not hide it."""
    async with scripted_mesh() as mesh:
        generation, _ = await enter(mesh)
        is_swallowed = await generation.__aexit__(ZeroDivisionError, ZeroDivisionError(), None)
        assert not is_swallowed
        await idle()
        mesh.assert_nothing_left()


async def test_no_task_is_left_behind() -> None:
    """A thousand tokens and a few recoveries leave as many tasks as before."""
    async with scripted_mesh() as mesh:
        before = len(asyncio.all_tasks())
        mesh.nodes[1].script = nth(40, Slow(9.0))
        await mesh.drive(mesh.generate(300))
        await idle()
        gc.collect()
        assert len(asyncio.all_tasks()) == before


# --- construction -------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"prompt_ids": ()}, {"choices": ()}, {"max_tokens": 0}, {"max_tokens": -1}])
def test_a_request_without_prompt_or_answer_is_a_fault_of_ours(fields: dict[str, object]) -> None:
    """The API has checked before."""
    values = {"prompt_ids": PROMPT, "choices": (GREEDY,), "max_tokens": 1, "eos_ids": frozenset(), "request_id": "r"}
    with pytest.raises(ValueError, match="a generation needs"):
        GenerationRequest(**{**values, **fields})  # type: ignore[arg-type]


async def test_sessions_are_unique_without_being_told_how() -> None:
    """Two generators never mint the same id."""
    mesh = create_mesh([], gateway_id="g", model="m", token=None)
    generators = [create_generator(mesh, model="m", num_layers=1, encode_text=lambda _text: []) for _ in range(2)]
    assert len({generator.mint_session_id() for generator in generators for _ in range(10)}) == 20
    assert generators[0].missing_route() == "no node is connected"
