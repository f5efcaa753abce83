"""Folders as the classes of models that also see save them: their text part is served, and nothing else is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PretrainedConfig, PreTrainedModel

from shard.loader import load_stage, plan_range
from shard.model_kind import read_kind
from shared.layers import LayerRange
from tests.support.architectures import VOCAB_SIZE, WINDOW
from tests.support.parity_case import BACK_TO, GAIN, STEPS, STEPS_AFTER, TOLERANCE, CutModel

NUM_LAYERS = 4
SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
HEADS = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
TEXT: dict[str, Any] = {**SIZES, **HEADS, "vocab_size": VOCAB_SIZE, "num_hidden_layers": NUM_LAYERS}
VISION = {**SIZES, "num_hidden_layers": NUM_LAYERS, "image_size": 28, "patch_size": 14}
"""As many layers as the text part, so that the two have to be told apart."""
QWEN_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
QWEN_SIZES = {"depth": NUM_LAYERS, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "out_hidden_size": 32}
QWEN_VISION = {**QWEN_SIZES, "patch_size": 14}
QWEN_IDS = {"image_token_id": 98, "video_token_id": 97, "vision_start_token_id": 96, "vision_end_token_id": 95}
GEMMA_TEXT = {**TEXT, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}
GEMMA_IDS = {"mm_tokens_per_image": 4, "image_token_index": 98, "boi_token_index": 97, "eoi_token_index": 96}


def gemma3() -> PretrainedConfig:
    """Its text class is a class of its own; stored with a prefix before all names."""
    return hf.Gemma3Config(text_config=GEMMA_TEXT, vision_config=VISION, **GEMMA_IDS)


def llava() -> PretrainedConfig:
    """Its text part is another model's."""
    return hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION), text_config=hf.LlamaConfig(**TEXT), image_token_index=98
    )


def qwen2_5_vl() -> PretrainedConfig:
    """Its text part has no class of its own; stored without the prefix that the model has."""
    return hf.Qwen2_5_VLConfig(text_config=QWEN_TEXT, vision_config=QWEN_VISION, **QWEN_IDS)


def qwen3_vl() -> PretrainedConfig:
    """Likewise, stored as the model is; images would enter between its layers."""
    vision = {**QWEN_VISION, "deepstack_visual_indexes": [0]}
    return hf.Qwen3VLConfig(text_config=QWEN_TEXT, vision_config=vision, **QWEN_IDS)


MODELS: dict[Callable[[], PretrainedConfig], str] = {
    gemma3: "Gemma3ForConditionalGeneration",
    llava: "LlavaForConditionalGeneration",
    qwen2_5_vl: "Qwen2_5_VLForConditionalGeneration",
    qwen3_vl: "Qwen3VLForConditionalGeneration",
}


def save(create: Callable[[], PretrainedConfig], folder: Path) -> PreTrainedModel:
    """The whole model, with weights enough that logits depend on the tokens before."""
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(hf, MODELS[create])(create()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(GAIN)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("create", MODELS, ids=lambda create: create.__name__)
def test_text_is_what_the_whole_model_makes_of_it(create: Callable[[], PretrainedConfig], tmp_path: Path) -> None:
    """Across a window's edge and back again, cut in single layers."""
    model = save(create, tmp_path)
    ranges = [LayerRange(i, i + 1) for i in range(NUM_LAYERS)]
    mesh = CutModel([load_stage(tmp_path, each, device="cpu") for each in ranges], cached=True)
    token_ids = torch.randint(3, 90, (1, sum(STEPS)), generator=torch.Generator().manual_seed(7))
    other_ids = torch.cat((token_ids[:, :BACK_TO], token_ids[:, : sum(STEPS_AFTER) - BACK_TO]), dim=1)
    ours = [mesh.step(token_ids, new_len) for new_len in STEPS][-1:]
    mesh.go_back(BACK_TO)
    ours += [mesh.step(other_ids, 1) for _ in range(BACK_TO, other_ids.shape[1])][-1:]
    with torch.no_grad():
        expected = [model(input_ids=ids).logits[0, -1] for ids in (token_ids, other_ids)]
    assert all(float((a - b).abs().max()) <= TOLERANCE for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("create", MODELS, ids=lambda create: create.__name__)
def test_a_range_reads_nothing_of_the_other_parts(create: Callable[[], PretrainedConfig], tmp_path: Path) -> None:
    """Neither the tower for images nor what joins it; together the ranges read the text part once."""
    model = save(create, tmp_path)
    plans = [plan_range(tmp_path, LayerRange(*bounds)) for bounds in ((0, 2), (2, NUM_LAYERS))]
    assert all(read_kind(tmp_path).is_part for _ in plans)
    read = {entry.name for plan in plans for entry in plan.entries.values()}
    assert not [name for name in read if "visi" in name or "visual" in name or "projector" in name]
    layers = [name for name in read if ".layers." in name]
    text = [name for name, _ in model.named_parameters() if "language_model" in name and ".layers." in name]
    assert len(layers) == len(text) > 0
