"""Packed linear layers and embeddings compute what plain ones do, as closely as their bits allow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from shard.linear import choice as choices
from shard.linear.choice import CACHE_FILE, KERNELS, choose_kernels
from shard.linear.embedding import Int4Embedding, Int8Embedding, embedding_bytes, embedding_kind
from shard.linear.floats import HalfFbgemm, OneDnn
from shard.linear.int4 import Int4Groups
from shard.linear.int8 import Int8Fbgemm, Int8OneDnn, Int8Weight, fbgemm_saturates, has_vnni
from shard.linear.packed import PackedLinear, RowBlocks, pack
from shard.linear.packing import Packing, pack_model, packable_embedding, packable_weights
from shard.linear.rows import Bf16Rows, Int4Rows, Int8Rows
from shard.model_outline import ModelOutline
from shared.errors import LoadFailed

CPU = torch.device("cpu")
ERRORS: dict[type[PackedLinear], float] = {
    OneDnn: 0.01,
    HalfFbgemm: 0.005,
    Int8Fbgemm: 0.03,
    Int8OneDnn: 0.03,
    Bf16Rows: 0.005,
    Int8Rows: 0.012,
    Int4Rows: 0.16,
    Int8Weight: 0.015,
    Int4Groups: 0.16,
}
"""Largest relative error of any row: rounding for those that keep all digits, else half a step of what is held."""
HERE = [kernel for kernel in ERRORS if kernel.is_available(torch.bfloat16)]
"""The kernels of this machine; every machine with torch has at least the last two."""


class TinyModel(nn.Module):
    """An embedding, a linear layer with bias, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self._keep_in_fp32_modules = self._keep_in_fp32_modules_strict = None  # as models of transformers have
        self.embed = nn.Embedding(64, 48)
        self.up = nn.Linear(48, 96)
        self.router = nn.Bilinear(4, 4, 4)
        self.head = nn.Linear(96, 64, bias=False)


def outline(*, tied: bool) -> ModelOutline:
    """How the tiny model names its parts."""
    ties = {"head.weight": "embed.weight"} if tied else {}
    return ModelOutline("layers", 1, "embed.weight", "head.weight", tied=tied, ties=ties)


def worst_row(outputs: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a row."""
    return float(((outputs.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("kernel", HERE)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_equals_the_plain_one(kernel: type[PackedLinear], rows: int, bias: bool) -> None:
    """Also where one position is a hundred times as large as the others, as the first one often is."""
    plain = nn.Linear(128, 160, bias=bias).bfloat16()
    inputs = torch.randn(1, rows, 128).bfloat16()
    inputs[0, 0] *= 100
    with torch.inference_mode():
        packed = kernel(plain.weight.detach().clone(), plain.bias)
        bias_f32 = None if plain.bias is None else plain.bias.float()
        expected = nn.functional.linear(inputs.float(), plain.weight.float(), bias_f32)
        outputs = packed(inputs)
    assert outputs.dtype is torch.bfloat16
    assert worst_row(outputs, expected) <= ERRORS[kernel]
    assert worst_row(packed.weight, plain.weight.detach().float()) <= ERRORS[kernel]
    assert (packed.in_features, packed.out_features) == (128, 160)
    assert packed(inputs[:, :0]).shape == (1, 0, 160)


@pytest.mark.parametrize("kernel", HERE)
def test_rows_of_zeros_give_zeros(kernel: type[PackedLinear]) -> None:
    """Nothing is divided by zero, in a weight or in inputs."""
    layer = kernel(torch.zeros(64, 64, dtype=torch.bfloat16), None)
    for rows in (1, 2):
        assert not layer(torch.zeros(rows, 64, dtype=torch.bfloat16)).any()


@pytest.mark.parametrize("kernel", HERE)
def test_packed_weights_take_what_the_kernel_announces(kernel: type[PackedLinear]) -> None:
    """Room is made for them by that figure, before they are read."""
    layer = kernel(torch.randn(256, 1024).bfloat16(), None)
    assert layer.nbytes == kernel.packed_bytes(256, 1024)


@pytest.mark.parametrize("kernel", [kernel for kernel in HERE if kernel.in_blocks])
def test_a_large_matrix_is_packed_in_blocks(kernel: type[PackedLinear], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same layer, from copies that are never larger than a block."""
    monkeypatch.setattr("shard.linear.packed.BLOCK_ELEMENTS", 64 * 128)
    weight, bias, inputs = torch.randn(160, 128).bfloat16(), torch.randn(160).bfloat16(), torch.randn(2, 128).bfloat16()
    blocks, whole = pack((kernel,), weight, bias), kernel(weight.clone(), bias)
    assert isinstance(blocks, RowBlocks)
    assert [block.out_features for block in blocks.blocks] == [64, 64, 32]
    assert blocks.nbytes == whole.nbytes
    assert worst_row(blocks(inputs), whole(inputs).float()) <= 0.01
    assert torch.equal(blocks.weight, whole.weight)


@pytest.mark.skipif(HalfFbgemm not in HERE, reason="needs FBGEMM")
def test_eight_bit_inputs_are_used_only_where_sums_hold_them() -> None:
    """On AVX-512 with VNNI they do."""
    assert fbgemm_saturates() is not has_vnni()
    assert Int8Fbgemm.is_available(torch.bfloat16) is has_vnni()


def test_a_matrix_that_no_kernel_takes_stays_plain() -> None:
    """Four bits want whole groups; the next kernel in order gets the rest, and without one nothing is packed."""
    odd = torch.randn(160, 40).bfloat16()
    assert isinstance(pack((Int4Groups, Int8Weight), odd, None), Int8Weight)
    plain = pack((Int4Groups,), odd, torch.ones(160).bfloat16())
    assert type(plain) is nn.Linear
    assert torch.equal(plain.weight, odd)


@pytest.mark.skipif(HalfFbgemm not in HERE, reason="needs FBGEMM")
def test_a_weight_beyond_float16_stays_plain() -> None:
    """It would become infinite."""
    weight = torch.ones(16, 16).bfloat16()
    weight[3, 3] = 1e6
    assert type(pack((HalfFbgemm,), weight, None)) is nn.Linear


@pytest.mark.parametrize(("width", "kind", "error"), [(40, Int8Embedding, 0.015), (64, Int4Embedding, 0.16)])
def test_an_embedding_gives_nearly_the_same_vectors(width: int, kind: type, error: float) -> None:
    """Each token has a scale of its own. Where four bits are wanted, a table without whole groups has eight."""
    weight = (torch.randn(48, width) * torch.logspace(-3, 1, 48)[:, None]).bfloat16()
    table = embedding_kind((48, width), four_bits=True)(weight)
    ids = torch.tensor([[0, 7, 47]])
    assert type(table) is kind
    assert table(ids).shape == (1, 3, width)
    assert table(ids).dtype is torch.bfloat16
    assert worst_row(table(ids)[0], weight[ids[0]].float()) <= error
    assert worst_row(table.weight, weight.float()) <= error
    assert table.nbytes == embedding_bytes((48, width), four_bits=True)
    assert embedding_kind((48, width), four_bits=False) is Int8Embedding


def test_float32_stays_what_transformers_computes() -> None:
    """Bit for bit: it is what answers are compared in. A GPU has its own kernels."""
    assert choose_kernels("none", CPU, torch.float32).kernels == ()
    assert choose_kernels("none", torch.device("cuda", 0), torch.bfloat16).kernels == ()


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_no_kernel_is_a_refusal(quantize: str) -> None:
    """Never a silent fallback to more bits."""
    with pytest.raises(LoadFailed, match=f"{quantize} has no kernel for cuda") as caught:
        choose_kernels(quantize, torch.device("cuda", 0), torch.bfloat16)
    assert caught.value.code == "quantize_unsupported"
    with pytest.raises(LoadFailed, match="none, int8, int4, got 'int3'"):
        choose_kernels("int3", CPU, torch.bfloat16)


def test_the_fastest_kernel_is_chosen_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured once per machine; a damaged file is measured anew."""
    asked: list[str] = []

    def measure(kernel: type[PackedLinear], _: torch.dtype) -> float:
        asked.append(kernel.name)
        return 1.0 if kernel is Int8Weight else 2.0

    monkeypatch.setattr(choices, "measure", measure)
    monkeypatch.setitem(KERNELS, "int8", (Int4Groups, Int8Weight))
    for _ in range(2):
        chosen = choose_kernels("int8", CPU, torch.bfloat16, tmp_path)
        assert chosen.kernels == (Int8Weight,)
        assert "weight-int8 1000000 us" in chosen.reason
    assert asked == ["weight-int4", "weight-int8"]
    assert len(json.loads((tmp_path / CACHE_FILE).read_text())) == 1
    (tmp_path / CACHE_FILE).write_text("{")
    assert choose_kernels("int8", CPU, torch.bfloat16, tmp_path).name == "weight-int8"
    assert len(asked) == 4


def test_measuring_takes_each_kernel_through_a_step() -> None:
    """What is compared is a time above zero."""
    assert choices.measure(Int8Weight, torch.bfloat16) > 0


def test_a_tied_head_and_its_embedding_stay_plain() -> None:
    """Their one weight is looked up by rows, and multiplied."""
    assert packable_weights(TinyModel(), outline(tied=False)) == {"up.weight", "head.weight"}
    assert packable_weights(TinyModel(), outline(tied=True)) == {"up.weight"}
    assert packable_embedding(TinyModel(), outline(tied=False)) == "embed.weight"
    assert packable_embedding(TinyModel(), outline(tied=True)) is None


def test_what_a_model_keeps_in_float32_stays_plain() -> None:
    """Names are found as transformers finds them, and the rest is packed all the same."""
    model = TinyModel()
    model._keep_in_fp32_modules_strict = {"u*p"}
    assert packable_weights(model, outline(tied=False)) == {"head.weight"}


def test_layers_are_replaced_largest_first() -> None:
    """Each weight is asked for once; what is not named stays; what does not divide into groups has eight bits."""
    model = TinyModel().bfloat16()
    weights = {name: model.get_parameter(name).detach() for name in ("up.weight", "head.weight", "embed.weight")}
    chosen = choices.KernelChoice((Int4Groups, Int8Weight), "asked for")
    packing = Packing(chosen, frozenset({"up.weight", "head.weight"}), "embed.weight")
    asked: list[str] = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        return weights[name]

    saved = pack_model(model, packing, read)
    assert asked == ["head.weight", "up.weight", "embed.weight"]
    assert isinstance(model.head, Int8Weight)
    assert isinstance(model.embed, Int8Embedding)
    assert isinstance(model.router, nn.Bilinear)
    packed = [model.head, model.up, model.embed]
    assert saved == sum(weight.nbytes for weight in weights.values()) - sum(
        getattr(module, "nbytes", weights["up.weight"].nbytes) for module in packed
    )
