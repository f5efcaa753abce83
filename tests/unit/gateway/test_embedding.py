"""Embeddings: each position counts once, whatever happens to the nodes meanwhile."""

from __future__ import annotations

import asyncio
import struct
from array import array

import pytest

from gateway.embedding import EmbeddingPool
from gateway.errors import AdmissionRefused, GenerationFailed
from shared.errors import StepFailed
from shared.messages import Cancel, Pooling, Release
from shared.tensor_spec import WireTensor
from tests.support.fake_model import expected_embedding
from tests.support.memory_mesh import NUM_LAYERS, ScriptedMesh, idle, scripted_mesh
from tests.support.scripted_node import Crash, Cut, Drop, Fail, Fate, Miss, Slow, nth

INPUT = tuple(range(100, 119))


async def check(mesh: ScriptedMesh, pooling: Pooling, ids: tuple[int, ...] = INPUT) -> None:
    """Embed, compare, and look for what is left."""
    vector = await mesh.drive(mesh.generator.embed(ids, pooling, "r"))
    await idle()
    assert list(vector) == list(array("f", expected_embedding(ids, pooling, num_layers=NUM_LAYERS)))
    mesh.assert_nothing_left()


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 19])
@pytest.mark.parametrize("cuts", [["0:6"], ["0:2", "2:4", "4:6"]])
async def test_inputs_of_any_length(pooling: Pooling, length: int, cuts: list[str]) -> None:
    """Over any cut; the session is released, and nothing is drawn."""
    async with scripted_mesh(cuts) as mesh:
        await check(mesh, pooling, INPUT[:length])
        assert all(node.ended == [Release(session="s1")] for node in mesh.nodes)
        assert all(step.output_len == 0 for step in mesh.nodes[-1].seen)
        assert mesh.generator.totals.outcomes == {"started": 1, "completed": 1}


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("fate", [Miss(), Cut(applied=True), Crash(1.0), Drop(), Fail("internal_error")])
async def test_any_hop_may_be_lost_at_any_chunk(pooling: Pooling, hop: int, number: int, fate: Fate) -> None:
    """A replay of the last hop counts everything anew; one of another hop, nothing twice."""
    async with scripted_mesh() as mesh:
        mesh.nodes[hop].script = nth(number, fate)
        await check(mesh, pooling)


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("journal_bytes_max", [1 << 30, 0])
@pytest.mark.parametrize("announced", [True, False])
async def test_a_last_hop_without_a_cache(pooling: Pooling, journal_bytes_max: int, announced: bool) -> None:
    """Its sum is of all positions each time."""
    options = {2: {"caches": False, "kv_cache": not announced}}
    async with scripted_mesh(node_options=options, journal_bytes_max=journal_bytes_max) as mesh:
        await check(mesh, pooling)


async def test_a_mesh_that_gives_none_refuses() -> None:
    """Before anything runs."""
    async with scripted_mesh(node_options={2: {"features": ("score", "fork")}}) as mesh:
        with pytest.raises(AdmissionRefused, match="embed") as refusal:
            await mesh.drive(mesh.generator.embed(INPUT, "mean", "r"))
        assert refusal.value.code == "sampling_unsupported"
        assert mesh.generator.totals.outcomes == {"refused": 1}
        mesh.assert_nothing_left()


async def test_a_failure_and_a_cancellation_leave_nothing() -> None:
    """Sessions are cancelled."""
    async with scripted_mesh() as mesh:
        mesh.nodes[1].script = lambda _step, _count: Fail("internal_error")
        with pytest.raises(GenerationFailed):
            await mesh.drive(mesh.generator.embed(INPUT, "mean", "r"))
        mesh.nodes[1].script = lambda _step, _count: Slow(1.0)
        asking = asyncio.ensure_future(mesh.generator.embed(INPUT, "mean", "r"))
        await mesh.drive(mesh.clock.sleep(1.5))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await idle()
        assert mesh.nodes[0].ended == [Cancel(session="s1"), Cancel(session="s2")]
        assert mesh.generator.totals.outcomes == {"started": 2, "failed": 1, "cancelled": 1}
        mesh.assert_nothing_left()


async def test_nothing_has_no_embedding() -> None:
    """The API has checked before."""
    async with scripted_mesh() as mesh:
        with pytest.raises(ValueError, match="at least one token"):
            await mesh.generator.embed((), "mean", "r")


def vector(*values: float) -> dict[str, WireTensor]:
    """A part as a last hop answers it."""
    return {"embedding": WireTensor("f32", (len(values),), memoryview(struct.pack(f"<{len(values)}f", *values)))}


def test_parts_add_up_and_begin_anew_at_the_start() -> None:
    """As after a replay."""
    pool = EmbeddingPool(4, "mean")
    pool.take(0, 2, vector(1, 2))
    pool.take(0, 3, vector(10, 20))
    pool.take(3, 1, vector(2, 4))
    assert pool.vector() == (3.0, 6.0)


@pytest.mark.parametrize(
    "tensors",
    [{}, vector(), vector(float("inf")), {"embedding": WireTensor("i32", (1,), memoryview(bytes(4)))}, vector(1, 2)],
)
def test_a_part_that_is_none_is_an_error_of_the_node(tensors: dict[str, WireTensor]) -> None:
    """Missing, empty, not finite, of another type, of another size than before; what was there stays."""
    pool = EmbeddingPool(2, "mean")
    pool.take(0, 1, vector(1))
    with pytest.raises(StepFailed, match="bad_answer"):
        pool.take(1, 1, tensors)
    pool.take(1, 1, vector(2))
    assert pool.vector() == (1.5,)


def test_a_gap_is_a_fault_of_ours() -> None:
    """Neither skipped positions nor an unfinished sum are ever given out."""
    pool = EmbeddingPool(3, "mean")
    pool.take(0, 1, vector(1))
    with pytest.raises(ValueError, match="starts at 2"):
        pool.take(2, 1, vector(1))
    with pytest.raises(ValueError, match="1 of 3"):
        pool.vector()
