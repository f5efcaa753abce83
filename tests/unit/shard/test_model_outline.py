"""How a model names its parts, and what of a checkpoint a range reads, decided by names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shard.model_outline import ModelOutline, layer_index, select_names
from shared.layers import LayerRange

UNTIED = ModelOutline("model.layers", 3, "model.embed_tokens.weight", "lm_head.weight", tied=False)
TIED = ModelOutline("model.layers", 3, "model.embed_tokens.weight", "lm_head.weight", tied=True)
LAYER_NAMES = [f"model.layers.{i}.mlp.experts.{j}.weight" for i in range(3) for j in range(2)]
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
PER_LAYER = "model.embed_tokens_per_layer.weight"
NAMES = [EMBED, *LAYER_NAMES, NORM, HEAD, PER_LAYER]


@pytest.mark.parametrize(
    ("start", "end", "special"),
    [(0, 1, {EMBED}), (1, 2, set()), (2, 3, {HEAD}), (0, 3, {EMBED, HEAD})],
)
def test_a_range_gets_its_layers_and_ends(start: int, end: int, special: set[str]) -> None:
    """The first range embeds, the last projects; what belongs to no layer comes along everywhere."""
    chosen = select_names(NAMES, UNTIED, LayerRange(start, end))
    layers = {name for name in LAYER_NAMES if start <= int(name.split(".")[2]) < end}
    assert set(chosen) == layers | special | {NORM, PER_LAYER}
    assert all(name == load_as for name, load_as in chosen.items())


@pytest.mark.parametrize("stored", [EMBED, HEAD])
@pytest.mark.parametrize(("start", "end", "load_as"), [(0, 1, EMBED), (1, 2, None), (2, 3, HEAD), (0, 3, EMBED)])
def test_a_tied_matrix_is_loaded_as_what_the_range_uses(stored: str, start: int, end: int, load_as: str | None) -> None:
    """A checkpoint may keep the tied matrix under either name; no range loads it twice."""
    names = [stored, *LAYER_NAMES, NORM]
    chosen = select_names(names, TIED, LayerRange(start, end))
    assert chosen.get(stored) == load_as


def test_a_tied_matrix_stored_twice_is_loaded_once() -> None:
    """The embedding's copy is the one that counts."""
    chosen = select_names(NAMES, TIED, LayerRange(2, 3))
    assert chosen[EMBED] == HEAD
    assert HEAD not in chosen


def test_names_without_the_models_prefix_are_recognized() -> None:
    """Checkpoints of the bare decoder leave out `model.`."""
    names = ["embed_tokens.weight", "layers.0.w", "layers.2.w", "norm.weight"]
    assert set(select_names(names, UNTIED, LayerRange(0, 1))) == {"embed_tokens.weight", "layers.0.w", "norm.weight"}


@pytest.mark.parametrize(
    ("name", "layer_list", "expected"),
    [
        ("model.layers.11.mlp.experts.7.up", "model.layers", 11),
        ("transformer.h.3.attn.weight", "transformer.h", 3),
        ("model.norm.weight", "model.layers", None),
        ("layers.5.layers.2.w", "model.layers", 5),
        ("model.layers.x.w", "model.layers", None),
    ],
)
def test_the_layer_is_the_first_number_after_the_lists_name(name: str, layer_list: str, expected: int | None) -> None:
    """Numbers further right are experts."""
    assert layer_index(name, layer_list) == expected


SHARING = ModelOutline(
    "model.layers", 3, EMBED, HEAD, tied=False,
    ties={"model.layers.1.shared.weight": "model.layers.0.shared.weight",
          "model.layers.2.shared.weight": "model.layers.0.shared.weight",
          "lm_head.bias": "model.head_bias"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("start", "end", "load_as", "ties"),
    [
        (0, 1, "model.layers.0.shared.weight", {}),
        (1, 3, "model.layers.1.shared.weight", {"model.layers.2.shared.weight": "model.layers.1.shared.weight"}),
        (2, 3, "model.layers.2.shared.weight", {}),
    ],
)
def test_a_tensor_that_layers_share_is_loaded_by_each_range(
    start: int, end: int, load_as: str, ties: dict[str, str]
) -> None:
    """As the first of them that the range has; the others are tied to that one."""
    layers = LayerRange(start, end)
    stored = "model.layers.0.shared.weight"
    chosen = select_names([EMBED, stored, HEAD, "model.head_bias"], SHARING, layers)
    assert chosen[stored] == load_as
    assert chosen["model.head_bias"] == "model.head_bias"
    bias = {"lm_head.bias": "model.head_bias"} if end == 3 else {}
    held = SHARING.ties_within(layers)
    assert {name: source for name, source in held.items() if "shared" in name} == ties
    assert {name for name in held if "bias" in name} == set(bias)


def test_every_range_gets_an_embedding_that_all_layers_use() -> None:
    """And a tied head with it is not read again."""
    outline = replace(TIED, embeds_everywhere=True)
    assert [select_names(NAMES, outline, LayerRange(i, i + 1)).get(EMBED) for i in range(3)] == [EMBED] * 3
    assert HEAD not in select_names([EMBED, *LAYER_NAMES], outline, LayerRange(2, 3)).values()


@pytest.mark.parametrize("root", ["model.language_model.", "language_model.model.", "text."])
@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.weight"])
def test_the_text_part_of_a_larger_checkpoint_is_found(root: str, head: str) -> None:
    """By where the embedding is; other towers have numbered layers and embeddings too, and are left out."""
    own = {f"{root}{name.removeprefix('model.')}": name for name in NAMES if name != HEAD} | {head: HEAD}
    others = ["vision_tower.layers.0.weight", "audio.embed_tokens.weight", "projector.weight"]
    assert select_names([*own, *others], UNTIED, LayerRange(0, 3), is_part=True) == own
    middle = select_names([*own, *others], UNTIED, LayerRange(1, 2), is_part=True)
    assert set(middle.values()) == {*(name for name in LAYER_NAMES if ".1." in name[:15]), NORM, PER_LAYER}


def test_numbered_layers_of_another_part_belong_to_every_range() -> None:
    """A vision tower inside the model is no decoder layer, whatever its layers are called."""
    tower = "model.vision.encoder.layers.0.weight"
    assert tower in select_names([*NAMES, tower], UNTIED, LayerRange(2, 3))


def test_head_and_embedding_of_a_part_are_tied_if_only_one_is_stored() -> None:
    """Whatever the larger model's config says."""
    assert TIED.tied_as_stored([EMBED, HEAD]).tied is False
    tied = UNTIED.tied_as_stored([EMBED])
    assert (tied.tied, tied.ties) == (True, {HEAD: EMBED})
    assert tied.tied_as_stored(["language_model.lm_head.weight"]).ties == {}
