"""Every architecture that transformers maps is served as docs/models.md says, or refused for the reason given there.

`MESHNET_ALL_MODELS=1` tries all of them, which takes minutes; without it one of each mechanism.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers
from structlog.testing import capture_logs

from shard.kv_layers import AbsentLayer
from shard.model_kind import read_kind
from shard.session_cache import StageCache
from tests.support.architectures import NUM_LAYERS, causal_model_types, tiny_config
from tests.support.models_docs import PAGE, documented_lines, documented_release, render
from tests.support.parity_case import choose_cuts, judge, ranges_between

ONE_OF_EACH = (
    "bart",  # an encoder-decoder
    "bloom",  # layers return tuples
    "deepseek_v4",  # compressed caches, several residual streams, ids on every hop
    "dory",  # layers that run twice
    "gemma3n",  # the text part of a larger model, keys and values shared, the embedding on every hop
    "glm_moe_dsa",  # what one layer chose is used by the next
    "mllama",  # layers that do not run without images
    "nemotron_h",  # attributes that the model reads of its layers
    "roberta",  # positions counted from the ids, a bias tied to the head's
    "zamba2",  # weights shared between layers, state and attention in one slot
)
MODEL_TYPES = (
    causal_model_types()
    if os.environ.get("MESHNET_ALL_MODELS") == "1"
    else [name for name in ONE_OF_EACH if name in causal_model_types()]
)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_architecture_is_what_the_page_says(model_type: str, tmp_path: Path) -> None:
    """Its logits are the whole's, at every cut; what is refused is refused from the config alone."""
    with capture_logs():
        line = judge(model_type, tmp_path).as_line()
    if transformers.__version__ == documented_release():
        assert line == documented_lines()[model_type], "stale: run `make models`"


@pytest.mark.parametrize("model_type", ["bamba", "qwen3_5", "qwen3_next"])
def test_some_node_holds_states_alone(model_type: str) -> None:
    """Also one of several layers: nothing there counts positions."""
    config = tiny_config(model_type).get_text_config(decoder=True)
    for cut in choose_cuts({}):
        caches = [StageCache(config, layers) for layers in ranges_between(cut)]
        kinds = [
            {type(slot).__name__ for slot in cache.slots.layers if not isinstance(slot, AbsentLayer)}
            for cache in caches
        ]
        assert {"LinearAttentionLayer"} in kinds, cut
        assert any("GrowingLayer" in each for each in kinds), cut


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_some_cut_parts_dense_layers_from_mixtures_of_experts(model_type: str, tmp_path: Path) -> None:
    """A node of dense layers alone, before nodes of experts alone."""
    tiny_config(model_type).save_pretrained(tmp_path)
    kind = read_kind(tmp_path)
    with torch.device("meta"):
        layers = kind.model_class(kind.config).model.layers
    kinds = [type(layer.mlp).__name__ for layer in layers]
    assert len(set(kinds)) == 2
    for cut in choose_cuts({}):
        assert all(len(set(kinds[each.start : each.end])) == 1 for each in ranges_between(cut)), cut


def test_some_nodes_hold_one_layer_each() -> None:
    """And some several."""
    lens = [[len(layers) for layers in ranges_between(cut)] for cut in choose_cuts({})]
    assert lens == [[2] * (NUM_LAYERS // 2), [1] * NUM_LAYERS]


@pytest.mark.skipif(transformers.__version__ != documented_release(), reason="docs/models.md is of another release")
def test_the_page_lists_every_architecture() -> None:
    """In the library's order, and what it says of them all is counted from its own table."""
    lines = documented_lines()
    assert list(lines) == causal_model_types()
    assert render(lines.values()) == PAGE.read_text(encoding="utf-8")
