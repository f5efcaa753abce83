"""Plans for a model in a folder: as nodes of every element type and quantization hold it."""

from __future__ import annotations

import pytest

from gateway.fleet.create import create_forecast
from gateway.fleet.settings import FleetSettings
from gateway.fleet.state import Member
from shared.layers import LayerRange
from shared.messages import MachineInfo, NodeInfo
from shared.models.measure import measure_model
from shared.models.range_memory import weights_bytes
from tests.conftest import TinyModels

LAYERS = LayerRange(0, 3)


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize(("dtype", "wire"), [("auto", None), ("float32", "f32"), ("bfloat16", "bf16")])
def test_a_range_takes_what_the_node_will_count(tiny_model: TinyModels, dtype: str, wire: str | None, quantize: str):
    """The same sum that the node takes before it loads, and `meshnet plan` with the same flags."""
    folder = tiny_model("qwen2")
    forecast = create_forecast(folder, FleetSettings(), chunk_tokens=256)
    assert forecast is not None
    offered = MachineInfo(memory_bytes=1 << 30, read_bytes_per_s=1 << 30, dtype=wire, quantize=quantize)
    member = Member(node="a", machine=offered)
    facts = measure_model(folder, dtype, quantize)
    cost = forecast.cost(member, LAYERS)
    assert cost.weights_bytes == weights_bytes(facts, LAYERS)
    assert cost.free_bytes == offered.memory_bytes - cost.weights_bytes - cost.kv_bytes - cost.working_bytes
    node = NodeInfo(node="a", model="m", layers=LAYERS, num_layers=6, dtype=wire or forecast.stored, quantize=quantize)
    assert forecast.precision(member) == node.precision
