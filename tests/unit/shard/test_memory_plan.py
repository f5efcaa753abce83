"""A node says what its range will take before it reads a weight, and refuses one that cannot fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shard import load, stage_runner
from shard.assignment import Loading
from shard.machine import Memory
from shard.memory_plan import MemoryPlan, state_memory
from shard.settings import KvLimits
from shard.stage_runner import StageRunner
from shared.errors import LoadFailed
from shared.layers import LayerRange
from shared.models.folder import ModelFolder
from shared.models.range_memory import CAPACITY_MIN, RangeMemory
from tests.conftest import TinyModels
from tests.unit.shard.test_settings import settings

NEED = RangeMemory(weights_bytes=1000 << 20, kv_bytes_per_token=1 << 10, state_bytes=1 << 20, working_bytes=100 << 20)
LAYERS = LayerRange(0, 3)
PLENTY = Memory(used_bytes=0, free_bytes=1 << 40, limit_bytes=1 << 41)


def plan(free_bytes: int, kv_bytes_max: int | None = None) -> MemoryPlan:
    """On a device with so much free memory."""
    return MemoryPlan(LAYERS, NEED, Memory(0, free_bytes, 4 << 30), kv_bytes_max)


def test_weights_a_step_and_one_short_session_must_fit():
    """To the byte."""
    least = (1000 << 20) + (100 << 20) + (1 << 20) + CAPACITY_MIN * (1 << 10)
    plan(least).check()
    with pytest.raises(LoadFailed) as refused:
        plan(least - 1).check()
    assert refused.value.code == "too_little_memory"
    assert refused.value.fields == {"needed_bytes": least, "free_bytes": least - 1}


def test_a_refusal_says_what_it_takes_what_there_is_and_what_to_do():
    """One sentence, sizes as people read them."""
    with pytest.raises(LoadFailed) as refused:
        plan(500 << 20).check()
    assert refused.value.message == (
        "layers 0:3 take 1000 MiB for weights, 100 MiB for a step, 1.08 GiB in all, "
        "and 500 MiB of 4 GiB are free: give it fewer --layers, or a smaller --dtype or --quantize"
    )


def test_a_budget_for_sessions_that_does_not_fit_is_named_with_what_would():
    """Weights fit, and what was promised to sessions does not."""
    with pytest.raises(LoadFailed, match=r"2 GiB for sessions \(--kv-max-bytes\).*at most 209715200, or give it"):
        plan(1300 << 20, kv_bytes_max=2 << 30).check()


def test_a_node_states_its_memory_once(tiny_model: TinyModels):
    """With every figure that decides."""
    with capture_logs() as logs:
        stated = state_memory(tiny_model("gemma3"), LAYERS, "float32", PLENTY, KvLimits(), weights_bytes=12_345)
    assert stated is not None
    (line,) = logs
    assert line["event"] == "stage.memory"
    assert line["weights"] == stated.need.weights_bytes == 12_345
    assert line["state_per_session"] == stated.need.state_bytes > 0
    assert line["kv_per_token"] > 0
    assert line["working"] > 0
    assert line["free"] == PLENTY.free_bytes


def test_a_model_that_cannot_be_measured_is_not_refused(tiny_model: TinyModels, tmp_path: Path):
    """Its weights may have names of their own: the node says so, and tries."""
    for path in tiny_model("llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 6', '"num_hidden_layers": 7'))
    with capture_logs() as logs:
        assert state_memory(tmp_path, LAYERS, "float32", PLENTY, KvLimits(), weights_bytes=12_345) is None
    assert [line["event"] for line in logs] == ["stage.memory_unknown"]


def load_llama(
    folder: Path, progress: list[int], *, joined: bool = False, quantize: str = "none", kernels_dir: Path | None = None
) -> StageRunner:
    """Load layers 0:2 as a node does: a range of its own, or one that a gateway gave it."""
    layers = None if joined else LayerRange(0, 2)
    given = replace(settings("127.0.0.1:0"), device="cpu", layers=layers, quantize=quantize)
    loading = Loading(lambda done, _: progress.append(done), lambda: None, lambda *_: None)
    return load.load_runner(given, ModelFolder(folder, "llama", "f"), LayerRange(0, 2), loading, cache_dir=kernels_dir)


def test_nothing_is_read_of_a_range_that_does_not_fit(tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch):
    """The refusal comes before the first byte."""
    monkeypatch.setattr(load, "device_memory", lambda _: Memory(0, 1000, 2000))
    progress: list[int] = []
    with pytest.raises(LoadFailed, match=r"1000 bytes of 1\.95 KiB are free"):
        load_llama(tiny_model("llama"), progress)
    assert progress == []


def test_a_range_that_a_gateway_gave_may_wait_for_the_one_before(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch
):
    """What is free while another range is held says nothing: `make_room` decides."""
    monkeypatch.setattr(load, "device_memory", lambda _: Memory(0, 1000, 2000))
    progress: list[int] = []
    assert load_llama(tiny_model("llama"), progress, joined=True).weight_bytes == progress[-1]


def test_what_a_step_works_in_is_not_offered_to_sessions(tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch):
    """The default budget is a share of what is left beside it."""
    monkeypatch.setattr(stage_runner, "device_memory", lambda _: PLENTY)
    runner = load_llama(tiny_model("llama"), [])
    assert 0 < runner.memory_free_bytes() < PLENTY.free_bytes
    assert runner.memory_limit_bytes == PLENTY.limit_bytes
    assert runner.memory_used_bytes() > runner.weight_bytes > 0


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_weights_are_stated_as_they_will_be_held(tiny_model: TinyModels, kernels_dir: Path, quantize: str):
    """Of every kind of weight, to the byte."""
    with capture_logs() as logs:
        runner = load_llama(tiny_model("llama"), [], quantize=quantize, kernels_dir=kernels_dir)
    (line,) = [line for line in logs if line["event"] == "stage.memory"]
    assert line["weights"] == runner.weight_bytes


def test_a_range_may_fit_only_quantized(tiny_model: TinyModels, kernels_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """What is refused in full is held in eight bits."""
    with capture_logs() as logs:
        load_llama(tiny_model("llama"), [])
    (line,) = [line for line in logs if line["event"] == "stage.memory"]
    free_bytes = line["weights"] // 2 + line["working"] + CAPACITY_MIN * line["kv_per_token"]
    monkeypatch.setattr(load, "device_memory", lambda _: Memory(0, free_bytes, free_bytes))
    with pytest.raises(LoadFailed, match="a smaller --dtype or --quantize"):
        load_llama(tiny_model("llama"), [])
    held = load_llama(tiny_model("llama"), [], quantize="int8", kernels_dir=kernels_dir)
    assert held.weight_bytes < line["weights"] // 2
