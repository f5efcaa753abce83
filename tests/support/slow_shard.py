"""A real node whose machine is slower than this one.

``python -m tests.support.slow_shard 2.5 --join ws://127.0.0.1:8000/mesh``: the factor, then what a node takes. Steps
take so many times as long, and it says so of itself. With ``20ms`` in place of the factor each layer takes so long
besides, whatever else this machine does; of that the node says nothing, nor does it measure: it says that it is fast.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shard import machine_info
from shard.machine_info import MachineFigures
from shard.runner import Pass, PassOutput, Runner
from shared.errors import MeshError

FAST = MachineFigures(
    device="cpu", runtime_bytes=0, read_bytes_per_s=10_000_000_000, prefill_bytes_per_s=1_000_000_000_000
)


class SlowRunner:
    """Everything of a runner, but each run takes `factor` times as long as it did."""

    def __init__(self, runner: Runner, factor: float) -> None:
        self._runner = runner
        self._factor = factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, passes: Sequence[Pass]) -> list[PassOutput | MeshError]:
        """Compute, and wait."""
        began_at = time.perf_counter()
        outputs = self._runner.run(passes)
        time.sleep((self._factor - 1) * (time.perf_counter() - began_at))
        return outputs


class DelayedRunner(SlowRunner):
    """Everything of a runner, but each layer takes so much longer."""

    def run(self, passes: Sequence[Pass]) -> list[PassOutput | MeshError]:
        """Compute, and wait."""
        time.sleep(self._factor * len(self._runner.layers))
        return self._runner.run(passes)


def slow_figures(figures: MachineFigures, factor: float) -> MachineFigures:
    """What a machine that is slower by `factor` would have measured."""
    return replace(
        figures,
        read_bytes_per_s=round(figures.read_bytes_per_s / factor),
        prefill_bytes_per_s=round(figures.prefill_bytes_per_s / factor),
    )


def slow_down(factor: float) -> None:
    """Slow down the node that this process is about to become."""
    from shard import load

    fast_load: Callable[..., Runner] = load.load_runner
    remembered: Callable[..., MachineFigures] = machine_info.remembered_figures
    load.load_runner = lambda *args, **named: SlowRunner(fast_load(*args, **named), factor)  # type: ignore[assignment, return-value]
    machine_info.remembered_figures = lambda *args, **named: slow_figures(remembered(*args, **named), factor)


def delay(layer_s: float) -> None:
    """Let each layer of the node that this process is about to become take so much longer, and let it not say so."""
    from shard import load

    fast_load: Callable[..., Runner] = load.load_runner
    load.load_runner = lambda *args, **named: DelayedRunner(fast_load(*args, **named), layer_s)  # type: ignore[assignment, return-value]
    machine_info.remembered_figures = lambda *_args, **_named: FAST


def main() -> int:
    """Run a slow node as a process."""
    from shard.__main__ import main as run_shard

    how = sys.argv.pop(1)
    if how.endswith("ms"):
        delay(float(how.removesuffix("ms")) / 1000)
    else:
        slow_down(float(how))
    return run_shard()


if __name__ == "__main__":
    sys.exit(main())
