"""What a node says of its machine: measured once, remembered, looked at anew where it changes; and what fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from shard.machine import Memory
from shard.machine_info import REMEMBERED_S, MachineFigures, Measured, describe_machine, remembered_figures
from shard.room import MemoryBudget, Room
from shared.errors import LoadFailed
from shared.models.fingerprint import fingerprint
from tests.conftest import TinyModels
from tests.support.node_settings import JOINING as SETTINGS

FIGURES = MachineFigures(device="cpu", runtime_bytes=400, read_bytes_per_s=10, prefill_bytes_per_s=300)


class Measuring:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.count = 0
        self.is_disturbed = False

    def __call__(self) -> Measured:
        """Measure."""
        self.count += 1
        return Measured(replace(FIGURES, read_bytes_per_s=self.count), self.is_disturbed)


def figures(folder: Path, measure: Measuring, now_s: float = 1e9, **changes: object) -> MachineFigures:
    """As a node finds them that starts at this time."""
    settings = replace(SETTINGS, **changes)  # type: ignore[arg-type]
    return remembered_figures(settings, folder, {}, measure=measure, now_s=now_s)


def test_figures_are_measured_once(tmp_path: Path) -> None:
    """A restart reads them; what they depend on makes others of them."""
    measure = Measuring()
    first = figures(tmp_path / "machines", measure)
    assert figures(tmp_path / "machines", measure) == first
    assert measure.count == 1
    for other, environ in (
        (replace(SETTINGS, threads=2), {}),
        (replace(SETTINGS, dtype="float32"), {}),
        (SETTINGS, {"CUDA_VISIBLE_DEVICES": "1"}),
    ):
        folder = tmp_path / "machines"
        assert remembered_figures(other, folder, environ, measure=measure, now_s=1e9) != first
    assert measure.count == 4


def test_figures_are_measured_again_once_they_are_old(tmp_path: Path) -> None:
    """A machine does not stay as it was; a clock that was set back says nothing of their age."""
    measure = Measuring()
    figures(tmp_path, measure)
    assert figures(tmp_path, measure, 1e9 + REMEMBERED_S - 1).read_bytes_per_s == 1
    assert figures(tmp_path, measure, 1e9 + REMEMBERED_S).read_bytes_per_s == 2
    assert figures(tmp_path, measure, 1e9).read_bytes_per_s == 3


def test_what_was_measured_on_a_busy_machine_is_not_remembered(tmp_path: Path) -> None:
    """It serves for this start; the next one measures."""
    measure = Measuring()
    measure.is_disturbed = True
    assert figures(tmp_path, measure).read_bytes_per_s == 1
    measure.is_disturbed = False
    assert [figures(tmp_path, measure).read_bytes_per_s for _ in range(2)] == [2, 2]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"device": "cpu"}', b'{"x": 1}'])
def test_figures_that_cannot_be_read_are_measured_again(tmp_path: Path, content: bytes) -> None:
    """A file that was cut short, or of another version, is replaced."""
    measure = Measuring()
    figures(tmp_path, measure)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    assert figures(tmp_path, measure).read_bytes_per_s == 2
    assert orjson.loads(path.read_bytes())["figures"]["read_bytes_per_s"] == 2


def test_machine_is_described(tmp_path: Path, tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory as given, or most of what is free; the models on the disk; the element type as messages name it."""
    monkeypatch.setattr("shard.machine_info._measure", lambda _: Measured(FIGURES))
    monkeypatch.setattr("shard.machine_info.machine_memory", lambda: Memory(70, 1000, 5000))
    folder = tiny_model("qwen2")
    info = describe_machine(replace(SETTINGS, model=str(folder), dtype="bfloat16"), tmp_path, {})
    assert (info.device, info.dtype, info.memory_bytes) == ("cpu", "bf16", 70 + 900)
    assert (info.runtime_bytes, info.read_bytes_per_s, info.prefill_bytes_per_s) == (400, 10, 300)
    assert info.models == (fingerprint(folder),)
    assert describe_machine(replace(SETTINGS, memory_bytes=5), tmp_path, {}).memory_bytes == 5


def test_measured_figures_are_in_proportion() -> None:
    """A long prefill step gets more out of each byte than a decode step; the runtime is what torch takes."""
    from shard.measure_machine import measure_machine

    figures = measure_machine("cpu", "float32", 1, "none").figures
    assert figures.device == "cpu"
    assert figures.prefill_bytes_per_s > figures.read_bytes_per_s > 10_000_000
    assert figures.runtime_bytes > 200_000_000


@pytest.mark.parametrize(("cpu_share", "is_disturbed"), [(1.0, False), (0.5, True)])
def test_a_measurement_says_whether_it_was_disturbed(
    monkeypatch: pytest.MonkeyPatch, cpu_share: float, is_disturbed: bool
) -> None:
    """A thread that had a core for half of the time measured a machine of half the speed."""
    from shard import measure_machine

    tries = []
    monkeypatch.setattr(measure_machine, "_time", lambda run, _device: tries.append(run) or (1.0, cpu_share))
    assert measure_machine.measure_machine("cpu", "float32", 1, "none").is_disturbed is is_disturbed
    assert len(tries) == 2 * (measure_machine.ATTEMPTS if is_disturbed else 1)


def test_budget_counts_what_is_used_and_what_is_free() -> None:
    """Whichever is less is left; two ranges at once need a tenth more than the second alone."""
    budget = MemoryBudget(memory_bytes=1000, runtime_bytes=100)
    assert budget.left_bytes(Room(free_bytes=5000, used_bytes=400)) == 600
    assert budget.left_bytes(Room(free_bytes=50, used_bytes=400)) == 50
    assert budget.left_bytes(Room(free_bytes=50, used_bytes=2000)) == 0
    assert budget.fits_beside(500, Room(free_bytes=550, used_bytes=0))
    assert not budget.fits_beside(500, Room(free_bytes=549, used_bytes=0))
    assert budget.session_bytes(600) == 300


def test_what_does_not_fit_is_refused_with_bytes() -> None:
    """Alone, or beside what is there now."""
    budget = MemoryBudget(memory_bytes=1000, runtime_bytes=100)
    budget.check_alone(899)
    with pytest.raises(LoadFailed, match="take 900 bytes, and this node has 900"):
        budget.check_alone(900)
    budget.check_now(500, Room(free_bytes=500, used_bytes=0))
    with pytest.raises(LoadFailed, match="take 501 bytes, and this node has 500"):
        budget.check_now(501, Room(free_bytes=500, used_bytes=0))
