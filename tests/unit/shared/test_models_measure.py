"""A model's facts from headers and config, against what a node would load and hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.layers import LayerRange
from shared.models.errors import ModelUnavailable
from shared.models.measure import measure_model
from shared.models.slots import read_forbidden_cuts, read_slots
from shared.planning.cost import CostModel
from shared.planning.fleet import Demand
from tests.conftest import TinyModels
from tests.support.odd_models import build_odd_model
from tests.support.tiny_models import KINDS, NUM_LAYERS, SLIDING_WINDOW


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [(0, 2), (2, 4), (4, 6), (0, 6)], ids=str)
def test_a_ranges_weights_are_what_a_node_loads(tiny_model: TinyModels, kind: str, layers: tuple[int, int]):
    """Byte for byte, for tied and untied heads, dense layers and experts."""
    from shard.loader import plan_range
    from shard.weight_map import range_bytes

    folder = tiny_model(kind)
    facts = measure_model(folder)
    loaded = range_bytes(plan_range(folder, LayerRange(*layers)).entries.values())
    assert CostModel(facts, Demand()).weights_bytes(LayerRange(*layers)) == loaded


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [(0, 2), (2, 6), (0, 6)], ids=str)
def test_quantized_weights_are_nearly_what_a_node_holds(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch, kind: str, layers: tuple[int, int], quantize: str
):
    """Within 10 %: small matrices that look like a linear layer's, as a router's, stay plain."""
    from shard.linear.choice import KERNELS
    from shard.linear.int8 import Int8Weight
    from shard.loader import load_stage

    monkeypatch.setitem(KERNELS, "int8", (Int8Weight,))  # on every machine
    if kind == "gemma3" and layers == (0, 2):
        pytest.skip("its embedding scales what it looks up, and stays plain: only the node knows")
    folder = tiny_model(kind)
    held = LayerRange(*layers)
    stage = load_stage(folder, held, device="cpu", dtype="bfloat16", quantize=quantize)
    facts = measure_model(folder, "bfloat16", quantize)
    assert CostModel(facts, Demand()).weights_bytes(held) == pytest.approx(stage.weight_bytes, rel=0.1)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_positions_caches_are_what_a_node_measures(tiny_model: TinyModels, kind: str):
    """What the node reports as `kv_bytes_per_token` once it has tried its layers."""
    from shard.loader import load_stage

    facts = measure_model(tiny_model(kind))
    stage = load_stage(tiny_model(kind), LayerRange(0, 3), device="cpu")
    assert sum(layer.slot.bytes_per_token for layer in facts.layers[:3]) == stage.kv_bytes_per_token


def test_another_element_type_halves_weights_caches_and_hidden_states(tiny_model: TinyModels):
    """Tiny models are stored in float32."""
    full, half = measure_model(tiny_model("llama")), measure_model(tiny_model("llama"), "bfloat16")
    assert full.layers[0].weight_bytes == 2 * half.layers[0].weight_bytes
    assert full.layers[0].slot.bytes_per_token == 2 * half.layers[0].slot.bytes_per_token
    assert full.hidden_bytes == 2 * half.hidden_bytes


def test_windows_and_states_bound_what_a_session_takes(tiny_model: TinyModels):
    """Sliding layers keep their window, linear-attention layers a state of one size."""
    gemma = measure_model(tiny_model("gemma3"))
    assert [layer.slot.tokens_max for layer in gemma.layers] == [SLIDING_WINDOW, SLIDING_WINDOW, None] * 2
    qwen = measure_model(tiny_model("qwen3_next"))
    assert [layer.slot.state_bytes > 0 for layer in qwen.layers] == [True, True, False] * 2
    assert [layer.slot.bytes_per_token > 0 for layer in qwen.layers] == [False, False, True] * 2


def test_only_chosen_experts_are_read_by_a_step(tiny_model: TinyModels):
    """Half of the experts of this model; a dense model reads everything."""
    sparse, dense = measure_model(tiny_model("qwen3_next")), measure_model(tiny_model("qwen2"))
    assert all(layer.active_bytes < layer.weight_bytes for layer in sparse.layers)
    assert all(layer.active_bytes == layer.weight_bytes for layer in dense.layers)


def test_tied_heads_are_told_from_untied(tiny_model: TinyModels):
    """Either way the last range holds one."""
    tied, untied = measure_model(tiny_model("qwen2")), measure_model(tiny_model("llama"))
    assert (tied.is_tied, untied.is_tied) == (True, False)
    assert tied.head_bytes == tied.embedding_bytes > 0
    assert untied.head_bytes > 0


def test_a_model_that_shares_keys_and_values_may_not_be_cut_between_them(tmp_path: Path):
    """gemma3n: layers 4 and 5 use what layers 2 and 3 keep."""
    facts = measure_model(build_odd_model("gemma3n", tmp_path))
    assert facts.forbidden_cuts == {3, 4, 5}
    assert [layer.slot.bytes_per_token > 0 for layer in facts.layers] == [True] * 4 + [False] * 2


def test_latents_are_cached_compressed():
    """Multi-head latent attention keeps the latent and the rotary part, once for all heads."""
    config = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128, "hidden_size": 7168}
    assert read_slots(config, 1, 2)[0].bytes_per_token == (512 + 64) * 2


def test_a_model_without_shared_layers_may_be_cut_anywhere():
    """The usual case."""
    assert read_forbidden_cuts({}, NUM_LAYERS) == frozenset()


def test_weights_without_the_configs_layers_are_refused(tiny_model: TinyModels, tmp_path: Path):
    """A config that names more layers than there are."""
    for path in tiny_model("llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 6', '"num_hidden_layers": 7'))
    with pytest.raises(ModelUnavailable, match="names 7 layers, and its weights no list of so many"):
        measure_model(tmp_path)
