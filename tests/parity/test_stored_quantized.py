"""Checkpoints that are stored quantized compute what transformers makes of them, from the range's own bytes alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from shard.loader import load_stage, plan_range
from shared.errors import LoadFailed
from shared.layers import LayerRange
from shared.models.measure import measure_model
from shared.models.spans import Span, merge
from shared.planning.cost import CostModel
from shared.planning.fleet import Demand
from tests.support.architectures import NUM_LAYERS, VOCAB_SIZE
from tests.support.parity_case import STEPS, TOLERANCE, CutModel, reference
from tests.support.stored_models import (
    COMPRESSED,
    FILE,
    STORED,
    build_compressed,
    build_dequantized,
    build_stored,
    edit_config,
    save_tensors,
)

THREE = (LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, NUM_LAYERS))
MIDDLE = THREE[1]
UNEVEN = (12, 20)
"""Divides no side of the tiny matrices: blocks at the edges are smaller."""
EXPERTS = "model.layers.3.mlp.experts.gate_up_proj"
MATRIX = "model.layers.3.mlp.up_proj.weight"
StoredModel = Callable[[str], Path]


@pytest.fixture(scope="module")
def stored_model(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """`stored_model("qwen3")` is the folder of a tiny model whose checkpoint is quantized."""
    built: dict[str, Path] = {}

    def find(model_type: str) -> Path:
        if model_type not in built:
            built[model_type] = build_stored(model_type, tmp_path_factory.mktemp("stored") / model_type)
        return built[model_type]

    return find


def whole_of(folder: Path) -> PreTrainedModel:
    """What transformers makes of a checkpoint, in float32; its release 5.17 leaves mxfp4's experts in bfloat16."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().float()


def cut_in_three(folder: Path) -> CutModel:
    """The checkpoint in three stages, in float32."""
    return CutModel([load_stage(folder, layers, device="cpu", dtype="float32") for layers in THREE], cached=True)


def assert_same_logits(mesh: CutModel, whole: PreTrainedModel) -> None:
    """A prefill and decode steps, each compared."""
    token_ids = torch.randint(3, VOCAB_SIZE, (1, sum(STEPS)), generator=torch.Generator().manual_seed(7))
    ours = [mesh.step(token_ids, new_len) for new_len in STEPS]
    theirs = reference(whole, token_ids, STEPS, cached=True)
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) <= TOLERANCE


@pytest.mark.parametrize("model_type", STORED)
def test_a_cut_model_computes_what_transformers_does(stored_model: StoredModel, model_type: str):
    """The same weights, bit for bit, and the same logits: experts one by one, and in one tensor."""
    whole, mesh = whole_of(stored_model(model_type)), cut_in_three(stored_model(model_type))
    expected = dict(whole.named_parameters())
    for stage in mesh.stages:
        for name, parameter in stage._model.named_parameters():
            assert torch.equal(parameter, expected[name]), name
    assert_same_logits(mesh, whole)


def test_blocks_at_the_edges_may_be_smaller(tmp_path: Path):
    """As DeepSeek's are, which transformers does not load; each element has the scale of the block it lies in."""
    folder = build_stored("qwen3", tmp_path / "stored", block=UNEVEN)
    plain = build_dequantized(folder, tmp_path / "plain", UNEVEN)
    assert_same_logits(cut_in_three(folder), whole_of(plain))


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_tensors_are_numbers_times_their_scales(tmp_path: Path, kind: str):
    """Of 8 bits or 4, with a scale for each row or group; the planner counts what the stages hold."""
    folder = build_compressed(kind, tmp_path / "stored", tmp_path / "plain")
    mesh, whole = cut_in_three(folder), whole_of(tmp_path / "plain")
    expected = dict(whole.named_parameters())
    for stage in mesh.stages:
        for name, parameter in stage._model.named_parameters():
            assert torch.equal(parameter, expected[name]), name
    assert_same_logits(mesh, whole)
    assert measure_model(folder, "float32") == measure_model(tmp_path / "plain", "float32")
    assert plan_range(folder, MIDDLE).weight_bytes() < 0.7 * plan_range(folder, MIDDLE).weight_bytes(torch.bfloat16)


def test_a_matrix_may_have_a_single_scale(tmp_path: Path):
    """`weight_block_size: null`, and scales of activations, which are computed in floats here."""
    folder = build_stored("qwen3", tmp_path / "stored", block=None, activation_scheme="static")
    tensors = load_file(folder / FILE)
    scales = {name: tensor.reshape(()) for name, tensor in tensors.items() if name.endswith("_scale_inv")}
    activations = {name.replace("weight_scale_inv", "activation_scale"): torch.ones(()) for name in scales}
    save_tensors(folder, tensors | scales | activations)
    assert not [entry.name for entry in plan_range(folder, MIDDLE).stored if "activation_scale" in entry.name]
    assert_same_logits(cut_in_three(folder), whole_of(folder))


@pytest.mark.parametrize("model_type", STORED)
def test_only_the_ranges_own_bytes_are_read(
    stored_model: StoredModel, model_type: str, monkeypatch: pytest.MonkeyPatch
):
    """Each once, scales included; that is what is shown as progress."""
    folder, read, preadv = stored_model(model_type), list[tuple[int, int]](), os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        read.append((offset, offset + count))
        return count

    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "preadv", counted)
    load_stage(folder, MIDDLE, device="cpu", dtype="float32", progress=lambda done, total: seen.append((done, total)))
    stored = plan_range(folder, MIDDLE).stored
    own = [name for name in load_file(folder / FILE) if ".layers.2." in name or ".layers.3." in name]
    assert {entry.name for entry in stored} == {*own, "model.norm.weight"}
    assert merge(Span(*each) for each in read) == merge(Span(entry.offset, entry.end) for entry in stored)
    own_bytes = sum(entry.nbytes for entry in stored)
    assert sum(end - start for start, end in read) == own_bytes
    assert seen[-1] == (own_bytes, own_bytes)


@pytest.mark.parametrize("layers", THREE, ids=str)
@pytest.mark.parametrize("model_type", STORED)
def test_stated_memory_is_that_of_the_floats(stored_model: StoredModel, model_type: str, layers: LayerRange):
    """The node's figure, the planner's and the parameters' agree to the byte, in the type that was asked for."""
    stated: list[int] = []
    stage = load_stage(
        stored_model(model_type),
        layers,
        device="cpu",
        dtype="float32",
        before_reading=lambda weight_bytes, _: stated.append(weight_bytes),
    )
    held_bytes = sum(parameter.nbytes for parameter in stage._model.parameters())
    planned = CostModel(measure_model(stored_model(model_type), "float32"), Demand()).weights_bytes(layers)
    assert stated == [stage.weight_bytes] == [held_bytes] == [planned]


@pytest.mark.parametrize("layers", THREE, ids=str)
def test_the_type_is_the_configs(stored_model: StoredModel, tmp_path: Path, layers: LayerRange):
    """`auto` is the same for every range; without a word in the config, what is stored plain decides."""
    folder = stored_model("qwen3")
    assert plan_range(folder, layers).stored_type == "BF16"
    silent = tmp_path / "silent"
    silent.mkdir()
    for path in folder.iterdir():
        (silent / path.name).write_bytes(path.read_bytes())
    edit_config(silent, dtype=None)
    assert plan_range(silent, layers).stored_type == "BF16"
    edit_config(silent, dtype="float32")
    assert plan_range(silent, layers).stored_type == "F32"
    assert measure_model(silent) == measure_model(folder, "float32")


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_weights_are_quantized_anew(stored_model: StoredModel, tmp_path: Path, kernels_dir: Path, quantize: str):
    """From the floats: the stage is that of the plain checkpoint, quantized the same way."""
    folder = stored_model("qwen3")
    plain = build_dequantized(folder, tmp_path / "plain", (8, 4))
    ours, theirs = (
        load_stage(each, MIDDLE, device="cpu", dtype="float32", quantize=quantize, cache_dir=kernels_dir)
        for each in (folder, plain)
    )
    assert ours.weight_bytes == theirs.weight_bytes < 0.5 * plan_range(folder, MIDDLE).weight_bytes(torch.float32)
    modules = dict(theirs._model.named_modules())
    packed = [name for name, module in ours._model.named_modules() if hasattr(module, "nbytes")]
    assert packed
    for name in packed:
        assert torch.equal(ours._model.get_submodule(name).weight, modules[name].weight), name


@pytest.mark.parametrize(
    ("model_type", "lacking", "named"),
    [
        ("qwen3", f"{MATRIX}_scale_inv", f"'{MATRIX}_scale_inv' is missing"),
        ("gpt_oss", f"{EXPERTS}_scales", f"'{EXPERTS}_scales' is missing"),
        ("gpt_oss", f"{EXPERTS}_blocks", f"'{EXPERTS}_blocks' is missing"),
    ],
)
def test_a_missing_part_is_named_before_a_weight_is_read(
    stored_model: StoredModel, tmp_path: Path, model_type: str, lacking: str, named: str
):
    """By the node and by the planner; ranges that do not need it load."""
    for path in stored_model(model_type).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / FILE)
    del tensors[lacking]
    save_tensors(tmp_path, tensors)
    with pytest.raises(LoadFailed, match=named) as caught:
        load_stage(tmp_path, MIDDLE, device="cpu", before_reading=lambda *_: pytest.fail("too late"))
    assert caught.value.code == "weights_corrupt"
    assert plan_range(tmp_path, THREE[0]).stored
