"""What one pass without weights shows of the way that a model's parts depend on each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from shard.layer_flow import LayerFlow, follow_layers
from shard.layer_sharing import layers_that_ignore, shared_sources
from shard.loader import load_stage, plan_range, read_refused_cuts
from shard.tracing import EMBEDDING, IDS, Tracing, comes_from, origins_of
from shard.weight_file import WeightReader
from shard.window import describe_model
from shared.errors import LoadFailed
from shared.layers import LayerRange
from tests.support.architectures import NUM_LAYERS, tiny_config


def flow_of(model_type: str) -> LayerFlow:
    """What flows in a tiny model of this type."""
    config = tiny_config(model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    before = dict(model.named_modules())
    flow = follow_layers(model, describe_model(model, config))
    assert dict(model.named_modules()) == before
    assert model.training
    return flow


def save_config(model_type: str, folder: Path, **fields: object) -> Path:
    """A folder without weights: what is refused there is refused before any is read."""
    config = tiny_config(model_type)
    for name, value in fields.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model_type", "flow"),
    [
        ("llama", LayerFlow()),
        ("gpt2", LayerFlow()),
        ("bloom", LayerFlow(tuple_len=1)),
        ("bamba", LayerFlow(tuple_len=2)),
        ("roberta", LayerFlow(positions_from_ids=True)),
        ("deepseek_v4", LayerFlow(needs_token_ids=True)),
        ("zamba", LayerFlow(needs_token_ids=True, needs_embedding=True)),
    ],
)
def test_what_ranges_need_is_found(model_type: str, flow: LayerFlow) -> None:
    """Without weights and without code for any one model; and the model is left as it was."""
    assert flow_of(model_type) == flow


def test_a_cut_between_a_layer_and_what_it_uses_is_refused() -> None:
    """Where the layer before hands on more than hidden states."""
    flow = flow_of("rwkv")
    assert flow.tuple_len == 3
    assert flow.refused_cuts == {cut: f"layer {cut} uses what layer {cut - 1} gave" for cut in range(1, NUM_LAYERS)}


def test_what_earlier_layers_gave_may_be_used_at_the_end() -> None:
    """Every block's beginning goes to the end of the model, so nothing behind the first block can be cut off."""
    cuts = flow_of("inkling2_text").refused_cuts
    assert list(cuts) == [2, 3, 4, 5]
    assert cuts[5] in {"layer 5 uses what layer 3 gave", "layer 5 uses what layer 1 gave"}


def test_shared_keys_and_values_are_named_by_the_config(tmp_path: Path) -> None:
    """The node names both layers, and a planner gets the cuts as data; ranges that share nothing are fine."""
    folder = save_config("gemma3n_text", tmp_path)
    why = {
        3: "layer 4 uses what layer 2 gave",
        4: "layer 4 uses what layer 2 gave",
        5: "layer 5 uses what layer 3 gave",
    }
    assert read_refused_cuts(folder) == why
    with pytest.raises(LoadFailed, match="before layer 4, but layer 4 uses what layer 2 gave") as caught:
        load_stage(folder, LayerRange(4, 6), device="cpu")
    assert caught.value.code == "cut_refused"
    assert caught.value.fields["refused_cuts"] == [3, 4, 5]
    with pytest.raises(LoadFailed, match="weights_missing"):
        plan_range(folder, LayerRange(2, 6))


def test_sharing_is_read_from_the_configs_lists() -> None:
    """A consumer's source is the last layer of its kind that has keys of its own."""
    config = tiny_config("gemma3n_text")
    assert shared_sources(config) == {4: 2, 5: 3}
    assert shared_sources(tiny_config("llama")) == {}
    config = tiny_config("hy_v4")
    assert layers_that_ignore(config) == {i for i, kind in enumerate(config.indexer_types) if kind == "full"}
    assert set(flow_of("hy_v4").refused_cuts) == set(range(1, NUM_LAYERS)) - layers_that_ignore(config)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("bart", "is an encoder-decoder"),
        ("dory", "its layers 2 to 3 run more than once in a pass"),
        ("cpmant", r"its layers get \[2, 39, 32\] for 7 positions"),
        ("hrm_text", "it has no list of 48 decoder layers"),
        ("blt", "does not say how many layers"),
        ("gemma4_unified_assistant", "its layers cannot be followed: ValueError: inputs_embeds and shared_kv_states"),
    ],
)
def test_what_cannot_be_served_is_refused_before_any_weight_is_read(
    model_type: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason; nothing but the config is looked at."""
    monkeypatch.setattr(WeightReader, "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(LoadFailed, match=words) as caught:
        load_stage(save_config(model_type, tmp_path), LayerRange(0, 1), device="cpu")
    assert caught.value.code == "model_unsupported"


def test_an_encoder_is_refused_unless_it_is_told_to_decode(tmp_path: Path) -> None:
    """Its tokens would see later ones, and the cached steps would silently be others."""
    with pytest.raises(LoadFailed, match="is_decoder: false"):
        read_refused_cuts(save_config("bert", tmp_path / "encoder", is_decoder=False))
    assert read_refused_cuts(save_config("bert", tmp_path / "decoder")) == {}


def test_tensors_remember_where_they_come_from() -> None:
    """Through operations, parts and assignments; what is asked of a value is answered without one."""
    ids = comes_from(torch.empty((2, 3), dtype=torch.long, device="meta"), IDS)
    table = torch.empty((5, 4), device="meta")
    with Tracing():
        looked_up = torch.nn.functional.embedding(ids, table)
        plain = torch.zeros_like(table)
        both = looked_up.sum() + comes_from(torch.empty((), device="meta"), EMBEDDING)
        plain[0] = looked_up[0, 0]
        assert bool((ids == 3).any())
        assert 3 not in ids
    assert origins_of(looked_up.shape) == origins_of(table) == frozenset()
    assert origins_of([looked_up, {"a": plain}]) == {IDS}
    assert origins_of(both) == {IDS, EMBEDDING}
