"""What becomes of a range that is not wanted any more: its stage goes, whenever its load ends."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from shard.assignment import Assignment, Loading, ServedModel
from shard.range_keeper import RangeKeeper
from shard.service import NodeService
from shard.settings import KvLimits
from shared.clock import SystemClock
from shared.layers import LayerRange
from tests.support.fake_runner import FakeRunner
from tests.support.flexible_node import MACHINE

WAIT_S = 10.0


class DeafLoader:
    """Loads to the end once it is let go on, whether anybody wants it or not."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.runner: weakref.ref[FakeRunner] | None = None

    def __call__(self, assignment: Assignment, _loading: Loading) -> FakeRunner:
        """Load."""
        self.entered.set()
        assert self.go_on.wait(WAIT_S)
        runner = FakeRunner(assignment.layers, assignment.model.num_layers)
        self.runner = weakref.ref(runner)
        return runner

    def is_gone(self) -> bool:
        """Whether nothing refers to what was loaded."""
        gc.collect()
        return self.runner is not None and self.runner() is None


async def until(condition: Callable[[], bool]) -> None:
    """Poll with a deadline."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def assignment(layers: str) -> Assignment:
    """A range of a model of four layers."""
    return Assignment(ServedModel("model", "name", 4), LayerRange.parse(layers))


@pytest.fixture
def loader() -> DeafLoader:
    """What loads."""
    return DeafLoader()


@pytest.fixture
async def keeper(loader: DeafLoader) -> RangeKeeper:
    """The keeper of a node without links."""
    service = NodeService(node_id="n", limits=KvLimits(), clock=SystemClock(), load=loader, machine=MACHINE)
    return service.keeper


async def test_load_that_was_given_up_and_ends_all_the_same_leaves_nothing(
    keeper: RangeKeeper, loader: DeafLoader
) -> None:
    """Its memory would otherwise be missing until the next change."""
    keeper.load(assignment("0:4"), "gateway")
    await until(loader.entered.is_set)
    keeper.unload("gateway")
    loader.go_on.set()
    await until(loader.is_gone)
    assert keeper.held is None
    assert keeper.next is None


async def test_range_that_was_held_leaves_nothing(keeper: RangeKeeper, loader: DeafLoader) -> None:
    """Nor does one that has served."""
    loader.go_on.set()
    keeper.load(assignment("0:4"), "gateway")
    await keeper.settled.wait()
    assert keeper.held is not None
    assert not loader.is_gone()
    keeper.unload("gateway")
    await until(loader.is_gone)
