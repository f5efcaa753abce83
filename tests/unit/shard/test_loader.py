"""Loading reads exactly the range's tensors, and says clearly what is wrong with a model it cannot load."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from shard.linear.choice import KernelChoice
from shard.linear.embedding import Int8Embedding
from shard.linear.floats import HalfFbgemm, OneDnn
from shard.linear.packed import PackedLinear
from shard.loader import load_stage, plan_range
from shard.stage import Stage, StageInput
from shared.errors import LoadFailed
from shared.layers import LayerRange
from shared.models.spans import Span, merge
from tests.conftest import TinyModels
from tests.support.tiny_models import KINDS, NUM_LAYERS

IDS = torch.tensor([[5, 6, 7]])
WHOLE = LayerRange(0, NUM_LAYERS)
QUANTIZED_SHARES = {"gemma3": 0.6, "qwen3_next": 0.5}
"""Of a range's weights: an embedding that scales what it looks up stays plain, and so do experts in one tensor."""
EditConfig = Callable[..., Path]


@pytest.fixture
def copy_of(tiny_model: TinyModels, tmp_path: Path) -> EditConfig:
    """A copy of a tiny model, with fields of its config replaced."""

    def copy(kind: str, **fields: Any) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(tiny_model(kind), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))
        return folder

    return copy


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a copy, to be changed and saved again."""
    return {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write them back."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def fails(folder: Path, code: str, layers: LayerRange = WHOLE, **choices: str) -> LoadFailed:
    """Loading fails with this code."""
    with pytest.raises(LoadFailed) as caught:
        load_stage(folder, layers, **{"device": "cpu", **choices})
    assert caught.value.code == code, caught.value
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_together_read_each_layer_once(tiny_model: TinyModels, kind: str) -> None:
    """No tensor of another range is read, none of its own is missing; a tied matrix is needed at both ends."""
    folder = tiny_model(kind)
    plans = [plan_range(folder, LayerRange(*bounds)) for bounds in ((0, 2), (2, 4), (4, NUM_LAYERS))]
    read = [{entry.name for entry in plan.entries.values()} for plan in plans]
    layers = [{name for name in names if ".layers." in name} for names in read]
    assert sum(len(names) for names in layers) == len(set.union(*layers))
    assert set.union(*read) == set(load_file(folder / "model.safetensors"))
    assert not any("embed" in name or "head" in name for name in read[1])
    assert sum(plan.weight_bytes() for plan in plans) < 2 * plan_range(folder, WHOLE).weight_bytes()


def test_nothing_but_the_ranges_bytes_is_read(tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte of every tensor once, whatever the element type, and the headers."""
    folder, read, preadv = tiny_model("qwen3_next"), list[tuple[int, int]](), os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        read.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    entries = plan_range(folder, LayerRange(2, 4)).entries.values()
    load_stage(folder, LayerRange(2, 4), device="cpu")
    merged = merge(Span(*each) for each in read)
    assert merged == merge(Span(entry.offset, entry.end) for entry in entries)
    assert sum(end - start for start, end in read) == sum(entry.nbytes for entry in entries)


def test_weight_bytes_are_what_the_stage_holds(tiny_model: TinyModels) -> None:
    """The plan's figure, the stage's and the parameters' agree."""
    stage = load_stage(tiny_model("llama"), LayerRange(2, 4), device="cpu")
    assert stage.weight_bytes == sum(parameter.nbytes for parameter in stage._model.parameters())
    assert stage.weight_bytes == plan_range(tiny_model("llama"), LayerRange(2, 4)).weight_bytes(torch.float32)


def test_other_ranges_need_not_be_there(copy_of: EditConfig) -> None:
    """A node that holds the first layers is content with a file that has no others."""
    folder = copy_of("llama")
    wanted = plan_range(folder, LayerRange(0, 2)).entries
    save(folder, {name: tensor for name, tensor in weights_of(folder).items() if name in wanted})
    load_stage(folder, LayerRange(0, 2), device="cpu").run(StageInput(token_ids=IDS))
    assert "lm_head.weight" in str(fails(folder, "weights_missing", LayerRange(2, NUM_LAYERS)))


@pytest.mark.parametrize("kind", KINDS)
def test_several_files_give_the_same_as_one(copy_of: EditConfig, kind: str) -> None:
    """The index decides which are opened: a damaged one of another range disturbs nobody."""
    folder = copy_of(kind)
    expected = load_stage(folder, LayerRange(0, 3), device="cpu").run(StageInput(token_ids=IDS))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    wanted = {entry.file for entry in plan_range(folder, LayerRange(0, 3)).entries.values()}
    assert wanted < set(files.values())
    for file in set(files.values()) - wanted:
        (folder / file).write_bytes(b"damaged")
    stage = load_stage(folder, LayerRange(0, 3), device="cpu")
    assert torch.allclose(stage.run(StageInput(token_ids=IDS)), expected, atol=1e-5)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_weights_are_converted_to_what_is_asked_for(copy_of: EditConfig, stored: torch.dtype, dtype: str) -> None:
    """The stored values, in the type that the stage computes in, and the log says why that one."""
    folder = copy_of("llama", dtype=str(stored).removeprefix("torch."))
    tensors = {name: tensor.to(stored) for name, tensor in weights_of(folder).items()}
    save(folder, tensors)
    with capture_logs() as logs:
        stage = load_stage(folder, LayerRange(1, 2), device="cpu", dtype=dtype)
    automatic = torch.float32 if stored is torch.float16 else stored
    expected = automatic if dtype == "auto" else getattr(torch, dtype)
    assert stage.dtype is expected
    norm = "model.layers.1.input_layernorm.weight"
    assert torch.equal(stage._model.get_parameter(norm), tensors[norm].to(expected))
    loaded = next(entry for entry in logs if entry["event"] == "stage.loaded")
    assert loaded["dtype_reason"]
    assert loaded["device_reason"] == "asked for"


HALVES = [kernel for kernel in (OneDnn, HalfFbgemm) if kernel.is_available(torch.bfloat16)]


@pytest.mark.parametrize("kernel", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_bfloat16_computes_what_plain_bfloat16_does(
    tiny_model: TinyModels, kind: str, kernel: type[PackedLinear], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same logits but for the order of summation; a head tied across nodes is packed too."""
    items = [StageInput(token_ids=IDS), StageInput(hidden_states=torch.randn(1, 3, 32))]
    ranges = (WHOLE, LayerRange(3, NUM_LAYERS))

    def load(*kernels: type[PackedLinear]) -> list[Stage]:
        monkeypatch.setattr("shard.loader.choose_kernels", lambda *_: KernelChoice(kernels, "asked for"))
        return [load_stage(tiny_model(kind), layers, device="cpu", dtype="bfloat16") for layers in ranges]

    packed, plain = load(kernel), load()
    assert any(isinstance(module, kernel) for module in packed[0]._model.modules())
    assert isinstance(packed[1]._model.get_output_embeddings(), kernel)
    for ours, theirs, item in zip(packed, plain, items, strict=True):
        expected = theirs.run(item).float()
        assert float((ours.run(item).float() - expected).abs().max()) <= 0.03 * float(expected.abs().max())


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_stage_computes_with_the_weights_it_holds(
    tiny_model: TinyModels, kernels_dir: Path, kind: str, quantize: str
) -> None:
    """As a plain stage with the same few bits in its weights does, also over a cache; int8 is near the model's own.

    Four bits of random weights are not: with experts to choose between, a token goes another way.
    """
    layers = LayerRange(0, 3)
    announced: list[int] = []
    plain = load_stage(tiny_model(kind), layers, device="cpu", dtype="float32")
    stage = load_stage(
        tiny_model(kind),
        layers,
        device="cpu",
        dtype="float32",
        quantize=quantize,
        cache_dir=kernels_dir,
        before_reading=lambda weight_bytes, _: announced.append(weight_bytes),
    )
    assert stage.quantize == quantize
    assert announced == [stage.weight_bytes]
    own = plain.run(StageInput(token_ids=IDS))
    share = unpack_into(plain, stage)
    assert share >= QUANTIZED_SHARES.get(kind, 0.95)
    assert stage.weight_bytes <= plain.weight_bytes * (1 - 0.7 * share)
    expected = plain.run(StageInput(token_ids=IDS))
    cache = stage.new_cache()
    first = stage.run(StageInput(token_ids=IDS[:, :-1], cache=cache))
    last = stage.run(StageInput(token_ids=IDS[:, -1:], cache=cache, past_len=cache.length))
    outputs = torch.cat((first, last), dim=1)
    assert float((outputs - expected).norm() / expected.norm()) <= 0.05
    assert quantize == "int4" or float((outputs - own).norm() / own.norm()) <= 0.1


def unpack_into(plain: Stage, quantized: Stage) -> float:
    """Give a stage the weights that a quantized one holds; returns the share of its elements."""
    modules, packed = dict(plain._model.named_modules()), 0
    with torch.no_grad():
        for name, module in quantized._model.named_modules():
            if isinstance(module, (PackedLinear, Int8Embedding)):
                modules[name].weight.copy_(module.weight)
                packed += module.weight.numel()
    return packed / sum(parameter.numel() for parameter in plain._model.parameters())


def test_what_a_model_keeps_in_float32_is_not_quantized(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And everything else is, as `--quantize` says."""
    monkeypatch.setattr(Qwen2ForCausalLM, "_keep_in_fp32_modules_strict", ["k_proj"])
    layers = LayerRange(1, 2)
    model = load_stage(tiny_model("qwen2"), layers, device="cpu", dtype="float32", quantize="int8")._model
    kinds = {name.rpartition(".")[2]: module for name, module in model.named_modules() if ".self_attn." in name}
    assert type(kinds["k_proj"]) is nn.Linear
    assert isinstance(kinds["q_proj"], PackedLinear)


def test_progress_covers_all_bytes_of_the_range(tiny_model: TinyModels) -> None:
    """It ends at the bytes that the plan announces."""
    seen: list[tuple[int, int]] = []
    layers = LayerRange(2, NUM_LAYERS)
    load_stage(tiny_model("llama"), layers, device="cpu", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (plan_range(tiny_model("llama"), layers).weight_bytes(),) * 2
    assert seen == sorted(seen)


def test_loading_prints_nothing(tiny_model: TinyModels, capfd: pytest.CaptureFixture[str]) -> None:
    """No bars or tables of transformers among our own output."""
    with capture_logs():
        load_stage(tiny_model("qwen2"), LayerRange(1, 2), device="cpu")
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


@pytest.mark.parametrize("layers", [LayerRange(0, 7), LayerRange(5, 8), LayerRange(6, 7)], ids=str)
def test_a_range_outside_the_model_is_refused(tiny_model: TinyModels, layers: LayerRange) -> None:
    """With the number of layers there are."""
    error = fails(tiny_model("llama"), "range_outside_model", layers)
    assert error.fields == {"layers": str(layers), "num_layers": NUM_LAYERS}


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    """It has no config."""
    assert fails(tmp_path, "model_not_found").fields == {"path": str(tmp_path)}


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "nobody-knows"}', '{"model_type": "vit"}'])
def test_a_config_of_no_causal_model_is_refused(copy_of: EditConfig, text: str) -> None:
    """Unreadable, of an unknown architecture, or of one that writes no text."""
    folder = copy_of("llama")
    (folder / "config.json").write_text(text)
    fails(folder, "model_unsupported")


def test_custom_code_is_not_run(copy_of: EditConfig) -> None:
    """A config that asks for its own Python is refused, not obeyed."""
    folder = copy_of("llama", model_type="my_own", auto_map={"AutoConfig": "evil.Config"})
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    fails(folder, "model_unsupported")


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"quant_method": "gptq"}, r"stored quantized \(gptq\), which is not loaded"), ("fp8", "no JSON object")],
)
def test_a_checkpoint_in_an_unknown_format_is_refused(copy_of: EditConfig, settings: Any, said: str) -> None:
    """Its scales are not weights to convert. What is loaded is in tests/parity/test_stored_quantized.py."""
    folder = copy_of("llama", quantization_config=settings)
    assert re.search(said, str(fails(folder, "model_unsupported")))


def test_a_missing_tensor_is_named(copy_of: EditConfig) -> None:
    """And nothing random takes its place."""
    folder = copy_of("llama")
    tensors = weights_of(folder)
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save(folder, tensors)
    error = fails(folder, "weights_missing")
    assert error.fields == {"missing": ["model.layers.3.mlp.up_proj.weight"]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_of_another_shape_is_refused(copy_of: EditConfig, dtype: str) -> None:
    """The weights are of another model than the config."""
    folder = copy_of("llama")
    tensors = weights_of(folder)
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save(folder, tensors)
    fails(folder, "weights_mismatch", dtype=dtype)


def test_a_truncated_file_is_refused(copy_of: EditConfig) -> None:
    """By its header, before anything is loaded."""
    folder = copy_of("llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "truncated" in str(fails(folder, "weights_corrupt"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_that_ends_while_it_is_read_is_refused(
    copy_of: EditConfig, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader's own error comes through, whatever transformers makes of it."""
    folder = copy_of("llama")
    monkeypatch.setattr("shard.weight_file.os.preadv", lambda *_: 0)
    assert "ends in the middle" in str(fails(folder, "weights_corrupt", dtype=dtype))


def test_running_out_of_memory_is_a_typed_failure(tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range that does not fit is refused by name."""

    def explode(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("shard.weight_file._allocate", explode)
    assert "0:6" in str(fails(tiny_model("llama"), "out_of_memory"))


@pytest.mark.parametrize(
    ("choices", "code"),
    [
        ({"device": "toaster"}, "device_unavailable"),
        ({"dtype": "int3"}, "dtype_unsupported"),
        ({"quantize": "int3"}, "quantize_unsupported"),
    ],
)
def test_impossible_choices_are_refused(tiny_model: TinyModels, choices: dict[str, str], code: str) -> None:
    """Before any weight is read."""
    fails(tiny_model("llama"), code, **choices)
