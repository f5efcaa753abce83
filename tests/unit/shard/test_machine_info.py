"""What a node says of its machine: measured once, remembered, looked at anew where it changes; and what fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from shard.machine import Memory
from shard.machine_info import MachineFigures, describe_machine, remembered_figures
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

    def __call__(self) -> MachineFigures:
        """Measure."""
        self.count += 1
        return replace(FIGURES, read_bytes_per_s=self.count)


def test_figures_are_measured_once(tmp_path: Path) -> None:
    """A restart reads them; what they depend on makes others of them."""
    measure = Measuring()
    first = remembered_figures(SETTINGS, tmp_path / "machines", {}, measure=measure)
    assert remembered_figures(SETTINGS, tmp_path / "machines", {}, measure=measure) == first
    assert measure.count == 1
    for other, environ in (
        (replace(SETTINGS, threads=2), {}),
        (replace(SETTINGS, dtype="float32"), {}),
        (SETTINGS, {"CUDA_VISIBLE_DEVICES": "1"}),
    ):
        assert remembered_figures(other, tmp_path / "machines", environ, measure=measure) != first
    assert measure.count == 4


@pytest.mark.parametrize("content", [b"", b"[]", b'{"device": "cpu"}', b'{"x": 1}'])
def test_figures_that_cannot_be_read_are_measured_again(tmp_path: Path, content: bytes) -> None:
    """A file that was cut short, or of another version, is replaced."""
    measure = Measuring()
    remembered_figures(SETTINGS, tmp_path, {}, measure=measure)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    assert remembered_figures(SETTINGS, tmp_path, {}, measure=measure).read_bytes_per_s == 2
    assert orjson.loads(path.read_bytes())["read_bytes_per_s"] == 2


def test_machine_is_described(tmp_path: Path, tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory as given, or most of what is free; the models on the disk; the element type as messages name it."""
    monkeypatch.setattr("shard.machine_info._measure", lambda _: FIGURES)
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

    figures = measure_machine("cpu", "float32", 1, "none")
    assert figures.device == "cpu"
    assert figures.prefill_bytes_per_s > figures.read_bytes_per_s > 10_000_000
    assert figures.runtime_bytes > 200_000_000


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
