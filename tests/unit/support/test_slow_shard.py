"""The slow node of planner tests: slower by its factor, and honest about it."""

from __future__ import annotations

import time

from shard.machine_info import MachineFigures
from shared.layers import LayerRange
from tests.support.fake_runner import FakeRunner
from tests.support.slow_shard import SlowRunner, slow_figures


class Taking(FakeRunner):
    """A runner whose every run takes 20 ms."""

    def run(self, passes: object) -> list[object]:  # type: ignore[override]
        """Compute nothing."""
        time.sleep(0.02)
        return [passes]


def test_runs_take_the_factors_time() -> None:
    """Everything else is the runner's own."""
    slow = SlowRunner(Taking(LayerRange(0, 2), 4), 3.0)
    began_at = time.perf_counter()
    assert slow.run([]) == [[]]
    assert time.perf_counter() - began_at >= 0.06
    assert slow.layers == LayerRange(0, 2)


def test_figures_are_divided() -> None:
    """Both speeds; memory is as it was."""
    slow = slow_figures(MachineFigures("cpu", 5, 100, 1000), 2.5)
    assert slow == MachineFigures("cpu", 5, 40, 400)
